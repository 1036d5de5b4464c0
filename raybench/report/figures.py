"""The report's figures as PNG: throughput, memory, and where a step's time goes; a panel a track."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from raybench.analysis.communication import time_split
from raybench.report.content import Report, Section
from raybench.report.text import known, milliseconds, number, percent, plain, size, spread, words

if TYPE_CHECKING:
    import pandas as pd

    from raybench.results.reader import Results

INK, MUTED, GRID = "#1f2328", "#656d76", "#d8dee4"
OWN, PEER, BAD = "#0969da", "#8c959f", "#cf222e"
STACK = {
    "parameters": "#0969da",
    "gradients": "#54aeff",
    "optimizer": "#8250df",
    "activations": "#d4a72c",
    "computing and everything else": "#afb8c1",
    "communication": "#0969da",
    "waiting for other ranks": "#d4a72c",
}
BYTES = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
}
SPLIT = {
    "computing and everything else": "rest_s",
    "communication": "communication_s",
    "waiting for other ranks": "waiting_s",
}
WIDTH_IN, ROW_IN, HEAD_IN, DPI = 9.0, 0.34, 0.95, 160

LABEL: dict[str, Any] = {
    "va": "center",
    "color": INK,
    "fontsize": 8.5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    "zorder": 1,
}

Draw = Callable[[Any, Section], None]


def write_figures(report: Report, results: Results, out: Path) -> list[Path]:
    """Draw every figure that has something to show into `out`; the files written."""
    split = time_split(results.latest())
    split_of = dict(iter(split.groupby("track")))

    def draw_split(ax: Any, section: Section) -> None:
        draw_time_split(ax, section, split_of[section.track])

    timed = [s for s in report.sections if s.cases.tokens_per_s.notna().any()]
    counted = [s for s in report.sections if s.cases.parameter_bytes.notna().any()]
    divided = [s for s in report.sections if s.track in split_of]
    figures: tuple[tuple[str, str, Sequence[Section], Draw], ...] = (
        ("benchmark.png", "Throughput", timed, draw_throughput),
        ("memory.png", "Memory of the fullest rank", counted, draw_memory),
        ("time-split.png", "Where the time of a step goes", divided, draw_split),
    )
    written = []
    # Names from outside may hold dollar signs, which would be read as formulas.
    with rc_context({"text.parse_math": False}):
        for name, title, sections, draw in figures:
            if sections:
                _figure(title, report, sections, draw).savefig(out / name, dpi=DPI)
                written.append(out / name)
    return written


def draw_throughput(ax: Any, section: Section) -> None:
    """Tokens per second with their interval; peers in grey, what was not measured in words."""
    rows = section.rows
    # An interval from two rounds can be wider than anything worth drawing: it is cut at the edge of the figure.
    edge = 1.5 * max(float(r.tokens_per_s) for r in rows if _ok(r))
    longest = max(
        min(float(r.tokens_per_s_high), edge) if known(r.tokens_per_s_high) else float(r.tokens_per_s)
        for r in rows
        if _ok(r)
    )
    for place, row in enumerate(rows):
        if not _ok(row):
            _say(ax, place, row)
            continue
        ax.barh(place, row.tokens_per_s, height=0.62, color=PEER if known(row.peer) else OWN, zorder=2)
        end = row.tokens_per_s
        if known(row.tokens_per_s_low):
            end = min(row.tokens_per_s_high, edge)
            arms = [[row.tokens_per_s - row.tokens_per_s_low], [end - row.tokens_per_s]]
            ax.errorbar(row.tokens_per_s, place, xerr=arms, color=INK, capsize=3, lw=1.2, capthick=1.2, zorder=3)
        label = f"{number(row.tokens_per_s, 4)} {spread(row.tokens_per_s, row.tokens_per_s_low, row.tokens_per_s_high)}"
        if known(row.ratio_to_control):
            label += f"   {number(row.ratio_to_control)} × control"
        if known(row.tokens_per_s_high) and row.tokens_per_s_high > edge:
            label = f"→ {label}"
        ax.text(end + longest * 0.012, place, label, **LABEL)
    _lay_out(ax, section, "tokens/s: median over rounds, 95 % interval", room=longest * 1.45)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def draw_memory(ax: Any, section: Section) -> None:
    """Bytes by category, stacked."""
    rows = [{name: getattr(r, column) for name, column in BYTES.items()} for r in section.rows]
    totals = _stack(ax, section, rows, lambda _, total: size(total))
    _lay_out(ax, section, "bytes of the rank that holds most", room=max(totals) * 1.18)
    ax.xaxis.set_major_locator(MultipleLocator(_binary_step(max(totals))))
    ax.xaxis.set_major_formatter(lambda value, _: re.sub(r"\.0+ ", " ", size(int(value))) if value else "0")


def draw_time_split(ax: Any, section: Section, split: pd.DataFrame) -> None:
    """Parts of the mean step, which sum to it."""
    found = {str(row.case): row for row in split.itertuples(index=False)}
    rows = [{n: getattr(found.get(str(c)), column, None) for n, column in SPLIT.items()} for c in section.cases.case]

    def label(place: int, step_s: float) -> str:
        rest = float(rows[place]["computing and everything else"] or 0)
        return f"{milliseconds(step_s)} ms, {percent(1 - rest / step_s)} exposed"

    totals = _stack(ax, section, rows, label)
    _lay_out(ax, section, "milliseconds a step, mean over ranks", room=max(totals) * 1.35)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value * 1e3:,.4g}")


def _stack(
    ax: Any, section: Section, rows: Sequence[dict[str, Any]], label: Callable[[int, float], str]
) -> list[float]:
    """Draw a stacked bar for every case that has parts; their lengths."""
    totals = []
    for place, (row, case) in enumerate(zip(rows, section.rows, strict=True)):
        parts = {name: float(value) for name, value in row.items() if known(value)}
        if not parts:
            _say(ax, place, case, otherwise="not recorded")
            continue
        start = 0.0
        for name, value in parts.items():
            ax.barh(place, value, left=start, height=0.62, color=STACK[name], label=name, zorder=2)
            start += value
        totals.append(start)
        ax.text(start, place, f"  {label(place, start)}", **LABEL)
    return totals


def _lay_out(ax: Any, section: Section, unit: str, room: float) -> None:
    ax.set_title(section.title, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=16)
    ax.text(0, 1.0, unit, transform=ax.transAxes, va="bottom", fontsize=8, color=MUTED, linespacing=2)
    names = [plain(row.case, 40) + (" (peer)" if known(row.peer) else "") for row in section.rows]
    ax.set_yticks(range(len(names)), names, fontsize=9, color=INK)
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.set_xlim(0, room)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color=GRID, lw=0.7)
    ax.tick_params(length=0, labelcolor=MUTED, labelsize=8, axis="x")
    ax.tick_params(length=0, axis="y")
    for side in ax.spines.values():
        side.set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    if chosen := dict(zip(labels, handles, strict=True)):
        ax.legend(
            chosen.values(), chosen.keys(), loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False,
            fontsize=8, labelcolor=MUTED, handlelength=1, handleheight=1, borderaxespad=0.1, columnspacing=1.2,
        )  # fmt: skip


def _figure(title: str, report: Report, sections: Sequence[Section], draw: Draw) -> Figure:
    heights = [HEAD_IN + ROW_IN * len(section.cases) for section in sections]
    total = sum(heights) + 0.9
    figure = Figure(figsize=(WIDTH_IN, total), facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.1, hspace=0.04)
    axes = figure.subplots(len(sections), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for ax, section in zip(axes[:, 0], sections, strict=True):
        draw(ax, section)
    figure.suptitle(title, x=0.014, ha="left", fontsize=13, color=INK, fontweight="bold")
    figure.supxlabel(_footer(report, sections), x=0.014, ha="left", fontsize=7.5, color=MUTED)
    return figure


def _footer(report: Report, sections: Sequence[Section]) -> str:
    """Where it was measured and what the gate said: every figure can be shown alone."""
    gates = [words(gate) for section in sections for gate in section.cases.gate]
    told = ", ".join(f"{gates.count(gate)} {gate}" for gate in dict.fromkeys(gates))
    facts = [report.facts[name] for name in ("Device", "Backend") if name in report.facts]
    facts += [f"scale {report.facts['Scale']}"] if "Scale" in report.facts else []
    facts += [f"torch {report.facts['torch']}"] if "torch" in report.facts else []
    return plain(" · ".join([*facts, f"gate: {told}"]), 180)


def _ok(row: Any) -> bool:
    return row.status == "ok" and known(row.tokens_per_s)


def _say(ax: Any, place: int, row: Any, otherwise: str = "not timed") -> None:
    """In place of a bar, why there is none."""
    text = otherwise if row.status == "ok" else words(row.status)
    color = MUTED if row.status in ("ok", "skipped") else BAD
    ax.text(0, place, f" {text}", **{**LABEL, "color": color})


def _binary_step(longest: float) -> float:
    """A power of two that divides an axis of bytes into three to six parts."""
    return 2.0 ** math.ceil(math.log2(longest / 6))
