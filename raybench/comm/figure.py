"""A sweep as a figure: time and bus bandwidth against the payload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from raybench.analysis.alpha_beta import Line
from raybench.analysis.communication import bus_factor
from raybench.comm.render import is_alone
from raybench.report.charts import COLORS
from raybench.report.collectives import where_of
from raybench.report.png import SHADES
from raybench.report.text import plain, short_size

MARKS = {"fp32": ("o", "-"), "bf16": ("s", "--")}


def draw(measured: pd.DataFrame, fitted: pd.DataFrame, path: Path) -> None:
    """Time and bus bandwidth against the payload: marks are medians, lines are the fit."""
    places = list(dict.fromkeys(zip(measured.setting, measured.group, strict=True)))
    with rc_context({"text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(11, 0.9 + 3.6 * len(places)), facecolor="white")
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", h_pad=0.1)
        axes = figure.subplots(len(places), 2, squeeze=False)
        for (setting, group), (left, right) in zip(places, axes, strict=True):
            part = measured[(measured.setting == setting) & (measured.group == group)]
            own = fitted[(fitted.setting == setting) & (fitted.group == group)]
            title = group if is_alone(measured) else f"{group}, {plain(setting, 40)}"
            _panel(left, right, part, own, title)
        _key(figure, measured)
        figure.savefig(path, dpi=160, format="png")


def _panel(left: Any, right: Any, part: pd.DataFrame, fitted: pd.DataFrame, title: str) -> None:
    timed = part[part.time_ns.notna()]
    for (kind, dtype), sizes in timed.groupby(["kind", "dtype"], sort=False):
        mark, dash = MARKS[str(dtype)]
        style: dict[str, Any] = {"color": _shade(kind), "fillstyle": "full" if dtype == "fp32" else "none"}
        payload = sizes.payload_bytes.astype(float)
        left.plot(payload, sizes.time_ns.astype(float) / 1e3, mark, ms=3.5, **style)
        right.plot(payload, sizes.bus_bandwidth_bytes_per_s.astype(float) / 1e9, mark, ms=3.5, **style)
        for line in _lines(fitted[(fitted.kind == kind) & (fitted.dtype == dtype)]):
            ends = _between(line.from_bytes, line.to_bytes)
            times = [line.time_s(s) for s in ends]
            factor = bus_factor(str(kind), int(sizes.group_size.iloc[0]))
            drawn = {"color": _shade(kind), "lw": 0.9, "ls": dash}
            left.plot(ends, [t * 1e6 for t in times], **drawn)
            right.plot(ends, [factor * s / t / 1e9 for s, t in zip(ends, times, strict=True)], **drawn)
    link = timed.link_bytes_per_s.dropna()
    if len(link):
        right.axhline(float(link.iloc[0]) / 1e9, color="#59636e", lw=0.8, ls=":")
        right.annotate("link", (0.01, float(link.iloc[0]) / 1e9), xycoords=("axes fraction", "data"), fontsize=7.5)
    where = where_of(timed.iloc[0]) if len(timed) else "nothing measured"
    for ax, what in ((left, "time of one operation, µs"), (right, "bus bandwidth, GB/s")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(f"{title}: {what}\n{where}", loc="left", fontsize=9)
        ax.set_xlabel("payload", fontsize=8)
        ax.xaxis.set_major_formatter(lambda value, _: short_size(round(value)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: "")
        ax.grid(color="#d8dee4", lw=0.5)
        ax.tick_params(length=0, labelsize=8)
        for side in ax.spines.values():
            side.set_visible(False)


def _lines(fitted: pd.DataFrame) -> list[Line]:
    names = list(Line.__dataclass_fields__)
    return [Line(*(row[name] for name in names)) for row in fitted[names].to_dict("records")]


def _between(low: int, high: int, num_points: int = 25) -> list[float]:
    """Sizes from `low` to `high`, evenly on a logarithmic scale: a straight line is curved there."""
    return [low * (high / low) ** (place / (num_points - 1)) for place in range(num_points)]


def _key(figure: Any, measured: pd.DataFrame) -> None:
    kinds = list(dict.fromkeys(measured.kind))
    handles = [Line2D([], [], color=_shade(kind), marker="o", ms=3.5, lw=0.9, label=kind) for kind in kinds]
    for dtype in dict.fromkeys(measured.dtype):
        mark, dash = MARKS[dtype]
        style = "full" if dtype == "fp32" else "none"
        handles.append(
            Line2D([], [], color="#59636e", marker=mark, ls=dash, lw=0.9, ms=3.5, fillstyle=style, label=dtype)
        )
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=8)
    figure.supxlabel(
        "marks: medians over rounds · lines: the fit α + β · S, by range of sizes", x=0.01, ha="left", fontsize=7.5
    )


def _shade(kind: Any) -> str:
    return SHADES[COLORS[str(kind)]]
