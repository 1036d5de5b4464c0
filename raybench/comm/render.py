"""A sweep as a reader sees it: a table on the terminal, a figure, and rows for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raybench.analysis.alpha_beta import Line
from raybench.analysis.communication import bus_factor
from raybench.report.text import MISSING, count, known, number, percent, plain, rate, size, words

PLACE = ["setting", "group", "dtype"]
SHADES = {
    "all_reduce": "#0969da",
    "reduce_scatter": "#1b7c83",
    "all_gather": "#1a7f37",
    "all_to_all": "#8250df",
    "broadcast": "#bf8700",
    "send": "#bc4c00",
    "send_receive": "#cf222e",
}
MARKS = {"fp32": ("o", "-"), "bf16": ("s", "--")}


def microseconds(nanoseconds: Any) -> str:
    return number(nanoseconds / 1e3) if known(nanoseconds) else MISSING


def table(measured: pd.DataFrame, fitted: pd.DataFrame, *, by_size: bool) -> RenderableType:
    """A table for each setting, group and type; a line an operation, or one a size.

    Args:
        measured: as `raybench.analysis.links.sizes` gives it.
        fitted: as `links` gives it.
    """
    blocks: list[RenderableType] = []
    for (setting, group, dtype), part in measured.groupby(PLACE, sort=False):
        first = part[part.group_size.notna()]
        where = _where(first.iloc[0]) if len(first) else "nothing measured"
        title = Text.assemble(
            (f"{group} {dtype}", "bold"), (f"  {where}", "dim"), "" if _is_alone(measured) else f"  {plain(setting)}"
        )
        own = fitted[(fitted.setting == setting) & (fitted.group == group) & (fitted.dtype == dtype)]
        blocks += [title, _by_size(part) if by_size else _by_operation(part, own)]
        for row in _unmeasured(part):
            blocks.append(Text(f" {row.kind}: {words(row.status)}: {plain(row.reason)}", style="yellow"))
    return Group(*blocks)


def _is_alone(measured: pd.DataFrame) -> bool:
    return bool(measured.setting.nunique() == 1)


def _where(row: Any) -> str:
    groups = "" if row.num_groups == 1 else f"{int(row.num_groups)} groups at once, each of "
    link = f", link {rate(row.link_bytes_per_s)}" if known(row.link_bytes_per_s) else ""
    ranks, nodes = count(int(row.group_size), "rank"), count(int(row.num_nodes), "node")
    return f"{groups}{ranks} on {nodes}, {row.backend}{link}"


def _unmeasured(part: pd.DataFrame) -> list[Any]:
    """Of every operation the first row that has no time, but what the budget left out is said as a size."""
    rows = part[part.status != "ok"].drop_duplicates("kind")
    return list(rows.itertuples())


Cell = Callable[[Any], str]
TIMES: tuple[tuple[str, Cell], ...] = (
    ("wrong", lambda row: number(row.num_wrong)),
    ("p50\nµs", lambda row: microseconds(row.p50_ns)),
    ("p95\nµs", lambda row: microseconds(row.p95_ns)),
    ("p99\nµs", lambda row: microseconds(row.p99_ns)),
    ("algbw\nGB/s", lambda row: _gigabytes(row.algorithm_bandwidth_bytes_per_s)),
    ("busbw\nGB/s", lambda row: _gigabytes(row.bus_bandwidth_bytes_per_s)),
    ("% of\nlink", lambda row: percent(row.fraction_of_link, 0)),
    ("sent\n× S", lambda row: _sent(row)),
    ("beside\ncompute", lambda row: _times(row.overlap_slowdown)),
    ("compute\nbeside", lambda row: _times(row.overlap_compute_slowdown)),
    ("×\nfirst", lambda row: number(row.speedup)),
)


def _by_operation(part: pd.DataFrame, fitted: pd.DataFrame) -> Table:
    """A line an operation: the fit, and what its largest size took."""
    grid = _grid("operation", "α\nµs", "fitted\nGB/s", "±", "fit\nerror", "largest", columns=_used(part))
    for kind, sizes in part.groupby("kind", sort=False):
        lines = fitted[fitted.kind == kind]
        timed = sizes[sizes.time_ns.notna()]
        if timed.empty:
            continue
        largest = timed.iloc[-1].copy()
        largest["num_wrong"] = sizes.num_wrong.sum()
        last = lines.iloc[-1] if len(lines) else None
        grid.add_row(
            str(kind),
            MISSING if last is None else microseconds(lines.iloc[0].alpha_s * 1e9),
            MISSING if last is None else _gigabytes(last.bus_bandwidth_bytes_per_s),
            MISSING if last is None else percent(last.bus_bandwidth_error),
            MISSING if last is None else percent(lines.fit_error.max(), 0),
            size(int(largest.payload_bytes)),
            *(cell(largest) for _, cell in _used(part)),
        )
    return grid


def _by_size(part: pd.DataFrame) -> Table:
    """A line a size, as nccl-tests prints them."""
    grid = _grid("operation", "size", columns=_used(part))
    for row in part.itertuples():
        if known(row.payload_bytes):
            grid.add_row(str(row.kind), size(int(row.payload_bytes)), *(cell(row) for _, cell in _used(part)))
    return grid


def _used(part: pd.DataFrame) -> list[tuple[str, Cell]]:
    """A column that says nothing in any row only takes room."""
    rows = list(part.itertuples())
    return [(name, cell) for name, cell in TIMES if any(cell(row) not in (MISSING, "") for row in rows)]


def _grid(*names: str, columns: list[tuple[str, Cell]]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 1), pad_edge=False)
    for place, name in enumerate((*names, *(name for name, _ in columns))):
        grid.add_column(name, justify="right" if place else "left", no_wrap=True)
    return grid


def _gigabytes(bytes_per_s: Any) -> str:
    return number(bytes_per_s / 1e9) if known(bytes_per_s) else MISSING


def _times(ratio: Any) -> str:
    return f"{number(ratio)}×" if known(ratio) else MISSING


def _sent(row: Any) -> str:
    """What the interfaces sent for one operation, as a multiple of its payload."""
    told = [value for value in (row.network_bytes, row.loopback_bytes) if known(value)]
    return number(sum(told) / row.payload_bytes) if told and known(row.payload_bytes) else MISSING


LEGEND = (
    "α, fitted: time = α + factor · S ÷ bandwidth, of the smallest and the largest range of sizes; ±: standard error",
    "algbw = S ÷ time, busbw = algbw × nccl-tests' factor; send: one hop, send_receive: both ways at once",
    "sent × S: bytes that the nodes' interfaces sent, all ranks together, ÷ payload (shared memory and RDMA show none)",
    "beside compute, compute beside: how many times longer each takes while the other runs",
)


def legend(measured: pd.DataFrame) -> list[str]:
    """What the columns mean, and what a reader could take for more than it is."""
    lines = list(LEGEND if measured.overlap_slowdown.notna().any() else LEGEND[:3])
    if not _is_alone(measured):
        lines.append(f"× first: time under {plain(measured.setting.iloc[0])} ÷ time here, paired by round")
    above = measured[(measured.fraction_of_link > 1).fillna(False)]
    for (group, kind), _ in above.groupby(["group", "kind"], sort=False):
        lines.append(
            f"{group} {kind}: its bus bandwidth is above the link, so it is no speed of a wire: a tree, a reduction in "
            "the network, or ranks of one node that share what crosses it move fewer bytes than a ring would"
        )
    short = measured[(measured.status == "skipped") & measured.payload_bytes.notna()]
    if len(short):
        lines.append(f"{count(len(short), 'size')} left out for the budget, the largest of each operation first")
    return lines


def as_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain data; unknown is null, times are in nanoseconds unless their name says otherwise."""
    return [
        {str(name): value if known(value) else None for name, value in row.items()} for row in frame.to_dict("records")
    ]


def draw(measured: pd.DataFrame, fitted: pd.DataFrame, path: Path) -> None:
    """Time and bus bandwidth against the payload: marks are medians, lines are the fit."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(zip(measured.setting, measured.group, strict=True)))
    with rc_context({"text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(11, 0.9 + 3.6 * len(places)), facecolor="white")
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", h_pad=0.1)
        axes = figure.subplots(len(places), 2, squeeze=False)
        for (setting, group), (left, right) in zip(places, axes, strict=True):
            part = measured[(measured.setting == setting) & (measured.group == group)]
            own = fitted[(fitted.setting == setting) & (fitted.group == group)]
            title = group if _is_alone(measured) else f"{group}, {plain(setting, 40)}"
            _panel(left, right, part, own, title)
        _key(figure, measured)
        figure.savefig(path, dpi=160)


def _panel(left: Any, right: Any, part: pd.DataFrame, fitted: pd.DataFrame, title: str) -> None:
    timed = part[part.time_ns.notna()]
    for (kind, dtype), sizes in timed.groupby(["kind", "dtype"], sort=False):
        mark, dash = MARKS[str(dtype)]
        style: Mapping[str, Any] = {"color": SHADES[str(kind)], "fillstyle": "full" if dtype == "fp32" else "none"}
        payload = sizes.payload_bytes.astype(float)
        left.plot(payload, sizes.time_ns.astype(float) / 1e3, mark, ms=3.5, **style)
        right.plot(payload, sizes.bus_bandwidth_bytes_per_s.astype(float) / 1e9, mark, ms=3.5, **style)
        for line in _lines(fitted[(fitted.kind == kind) & (fitted.dtype == dtype)]):
            ends = _between(line.from_bytes, line.to_bytes)
            times = [line.time_s(s) for s in ends]
            factor = bus_factor(str(kind), int(sizes.group_size.iloc[0]))
            drawn = {"color": SHADES[str(kind)], "lw": 0.9, "ls": dash}
            left.plot(ends, [t * 1e6 for t in times], **drawn)
            right.plot(ends, [factor * s / t / 1e9 for s, t in zip(ends, times, strict=True)], **drawn)
    link = timed.link_bytes_per_s.dropna()
    if len(link):
        right.axhline(float(link.iloc[0]) / 1e9, color="#59636e", lw=0.8, ls=":")
        right.annotate("link", (0.01, float(link.iloc[0]) / 1e9), xycoords=("axes fraction", "data"), fontsize=7.5)
    where = _where(timed.iloc[0]) if len(timed) else "nothing measured"
    for ax, what in ((left, "time of one operation, µs"), (right, "bus bandwidth, GB/s")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(f"{title}: {what}\n{where}", loc="left", fontsize=9)
        ax.set_xlabel("payload", fontsize=8)
        ax.xaxis.set_major_formatter(lambda value, _: size(round(value)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.grid(color="#d8dee4", lw=0.5)
        ax.tick_params(length=0, labelsize=8)
        for side in ax.spines.values():
            side.set_visible(False)


def _lines(fitted: pd.DataFrame) -> list[Line]:
    names = list(Line.__dataclass_fields__)
    return [Line(**row) for row in fitted[names].to_dict("records")]


def _between(low: int, high: int, num_points: int = 25) -> list[float]:
    """Sizes from `low` to `high`, evenly on a logarithmic scale: a straight line is curved there."""
    return [low * (high / low) ** (place / (num_points - 1)) for place in range(num_points)]


def _key(figure: Any, measured: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    kinds = list(dict.fromkeys(measured.kind))
    handles = [Line2D([], [], color=SHADES[kind], marker="o", ms=3.5, lw=0.9, label=kind) for kind in kinds]
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
