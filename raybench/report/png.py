"""Charts as PNG, a panel a track."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from raybench.report.charts import Bars, Chart, Curves, Figure, Lines, Nodes, Rows, log_ticks, ticks
from raybench.report.text import plain

Shades = Mapping[str, str]
INK, MUTED, GRID = "#1f2328", "#59636e", "#d8dee4"
SHADES = {
    "blue": "#0969da",
    "teal": "#1b7c83",
    "purple": "#8250df",
    "yellow": "#bf8700",
    "orange": "#bc4c00",
    "green": "#1a7f37",
    "pink": "#bf3989",
    "red": "#cf222e",
    "grey": "#8c959f",
}
TONES = {"own": "#0969da", "peer": "#8c959f", "bad": "#cf222e", "muted": "#59636e"}
WIDTH_IN, ROW_IN, DPI = 9.0, 0.34, 160
HEAD_IN = 1.0
"""Of a panel: title, unit, legend, axis."""
TITLE_PAD = 28
"""Points between a panel and its title, in which its basis and unit stand."""
LEGEND_PAD = 16
"""Points more for every line of a legend beneath them."""
LEGEND_COLUMNS = 4
LABEL: dict[str, Any] = {
    "va": "center",
    "color": INK,
    "fontsize": 8.5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    "zorder": 2.8,
}


def write_figures(figures: Sequence[Figure], foot: str, out: Path) -> list[Path]:
    """Draw every figure into `out`; the files written.

    Args:
        foot: what was measured where, under every figure.
    """
    written = []
    # Names from outside may hold dollar signs, which would be read as formulas.
    with rc_context({"text.parse_math": False, "font.size": 9}):
        for figure in figures:
            path = out / f"{figure.name}.png"
            _canvas(figure, foot).savefig(path, dpi=DPI)
            written.append(path)
    return written


def _canvas(figure: Figure, foot: str) -> Canvas:
    heights = [HEAD_IN + ROW_IN * _num_rows(chart) for _, chart, _ in figure.charts]
    total = sum(heights) + 0.9
    canvas = Canvas(figsize=(WIDTH_IN, total), facecolor="white")
    FigureCanvasAgg(canvas)
    canvas.set_layout_engine("constrained", h_pad=0.12, w_pad=0.1, hspace=0.04)
    axes = canvas.subplots(len(figure.charts), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    canvas.suptitle(figure.title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    canvas.supxlabel(foot, x=0.012, ha="left", fontsize=7.5, color=MUTED)
    shades = figure.colors
    for (_, chart, basis), ax in zip(figure.charts, axes[:, 0], strict=True):
        _panel(ax, chart, basis)
        _DRAWN[type(chart)](ax, chart, shades)
    return canvas


def _num_rows(chart: Chart) -> float:
    if isinstance(chart, Bars):
        return len(chart.bars)
    if isinstance(chart, Rows):
        return sum(len(rows) + 0.9 for _, rows in chart.groups)
    if isinstance(chart, Nodes):
        return sum(2.0 + 1.7 * max(len(ranks) for _, ranks in nodes) for _, nodes in chart.groups)
    return 10 if isinstance(chart, Curves) else 8


def _panel(ax: Any, chart: Chart, basis: str) -> None:
    named = () if isinstance(chart, Nodes) else chart.series
    raised = LEGEND_PAD * -(-len(named) // LEGEND_COLUMNS)
    ax.set_title(
        plain(chart.title, 90), loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=TITLE_PAD + raised
    )
    under = f"{plain(basis, 120)}\n{chart.unit}"
    place = ax.transAxes + ScaledTranslation(0, raised / 72, ax.figure.dpi_scale_trans)
    text = ax.text(0, 1.0, under, transform=place, va="bottom", fontsize=7.5, color=MUTED)
    text.set_in_layout(False)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, labelcolor=MUTED, labelsize=8)
    for side in ax.spines.values():
        side.set_visible(False)


def _legend(ax: Any, names: dict[str, str]) -> None:
    if names:
        handles = [Patch(facecolor=SHADES[shade], label=name) for name, shade in names.items()]
        legend = ax.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(handles), LEGEND_COLUMNS),
            frameon=False, fontsize=7.5, labelcolor=MUTED, handlelength=1, handleheight=1, borderaxespad=0.1,
            columnspacing=1.2, borderpad=0,
        )  # fmt: skip
        legend.set_in_layout(False)


def _bars(ax: Any, chart: Bars, shades: Shades) -> None:
    reach = chart.reach
    named = shades if chart.series else {}
    for place, bar in enumerate(chart.bars):
        start = 0.0
        for name, value in bar.parts:
            color = SHADES[named[name]] if named else TONES[bar.tone]
            ax.barh(place, value, left=start, height=0.62, color=color, zorder=2)
            start += value
        end = start
        if bar.low is not None and bar.high is not None:
            end = min(bar.high, reach)
            arms = [[start - max(bar.low, 0.0)], [max(end - start, 0.0)]]
            ax.errorbar(start, place, xerr=arms, color=INK, capsize=3, lw=1.2, capthick=1.2, zorder=3)
        color = {"bad": TONES["bad"], "muted": TONES["muted"]}.get(bar.tone, INK)
        ax.text(end + reach * 0.012, place, bar.text, **{**LABEL, "color": color})
    if chart.mark is not None:
        ax.axvline(chart.mark, color=INK, lw=0.9, ls=(0, (4, 3)), zorder=2.5)
    ax.set_yticks(range(len(chart.bars)), [bar.label for bar in chart.bars], fontsize=9)
    ax.tick_params(axis="y", labelcolor=INK)
    ax.set_ylim(len(chart.bars) - 0.45, -0.55)
    ax.set_xlim(0, reach * 1.5)
    places = ticks(reach, binary=chart.binary)
    ax.set_xticks(places, [chart.tick(value) for value in places])
    ax.grid(axis="x", color=GRID, lw=0.7)
    _legend(ax, {name: shades[name] for name in chart.series})


def _lines(ax: Any, chart: Lines, shades: Shades) -> None:
    for line, width in zip(chart.lines, chart.widths, strict=True):
        x, y = zip(*line.points, strict=True)
        style = {"ls": (0, (4, 2)) if line.dashed else "-", "marker": "o" if len(x) == 1 else None, "ms": 3}
        ax.plot(x, y, color=SHADES[shades[line.label]], lw=0.8 * width, label=line.label, **style)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(chart.x_unit, fontsize=8, color=MUTED)
    ax.grid(color=GRID, lw=0.7)
    _legend(ax, {name: shades[name] for name in chart.series})


def _curves(ax: Any, chart: Curves, shades: Shades) -> None:
    for line in chart.lines:
        x, y = zip(*line.points, strict=True)
        style = {"ls": (0, (4, 2)) if line.dashed else "-", "fillstyle": "none" if line.dashed else "full"}
        ax.plot(x, y, color=SHADES[shades[line.label]], lw=1.2, marker="o", ms=3.5, **style)
    if chart.mark is not None:
        ax.axhline(chart.mark, color=INK, lw=0.9, ls=(0, (4, 3)), zorder=1.5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for axis, tick, ends in ((ax.xaxis, chart.x_tick, chart.x_ends), (ax.yaxis, chart.y_tick, chart.y_ends)):
        places = log_ticks(ends, binary=axis is ax.xaxis)
        axis.set_ticks(places, [tick(value) for value in places])
        axis.set_ticks([], minor=True)
    ax.set_ylim(*chart.y_ends)
    ax.grid(color=GRID, lw=0.7)
    _legend(ax, {name: shades[name] for name in chart.series})


def _rows(ax: Any, chart: Rows, shades: Shades) -> None:
    place = 0.0
    marks, names = [], []
    for name, rows in chart.groups:
        ax.text(0, place, name, fontsize=9, color=INK, fontweight="bold", va="center")
        place += 0.9
        for row in rows:
            for stretch in row.thick:
                span = [(stretch.begin, stretch.end - stretch.begin)]
                ax.broken_barh(span, (place - 0.36, 0.5), facecolors=SHADES[shades[stretch.series]], zorder=2)
            for stretch in row.thin:
                span = [(stretch.begin, stretch.end - stretch.begin)]
                ax.broken_barh(span, (place + 0.18, 0.14), facecolors=SHADES["blue"], zorder=2)
            marks.append(place - 0.1)
            names.append(row.label)
            place += 1
    ax.set_yticks(marks, names, fontsize=8)
    ax.set_ylim(place - 0.4, -0.6)
    ax.set_xlim(0, chart.reach)
    places = ticks(chart.reach)
    ax.set_xticks(places, [f"{value * 1e3:,.4g}" for value in places])
    ax.grid(axis="x", color=GRID, lw=0.7)
    _legend(ax, {name: shades[name] for name in chart.series})


def _nodes(ax: Any, chart: Nodes, shades: Shades) -> None:
    place = 0.0
    for name, nodes in chart.groups:
        ax.text(
            0,
            place + 0.2,
            textwrap.shorten(name, 100, placeholder=" …", break_on_hyphens=False),
            fontsize=9,
            color=INK,
            fontweight="bold",
            va="center",
        )
        tallest = max(len(ranks) for _, ranks in nodes)
        width = 1 / len(nodes)
        for column, (node, ranks) in enumerate(nodes):
            left, top = column * width, place + 0.6
            ax.barh(top + 0.45 + 0.85 * tallest, width * 0.97, left=left, height=0.9 + 1.7 * tallest, color="#f6f8fa")
            ax.text(left + 0.01, top + 0.4, node, fontsize=8, color=MUTED, va="center")
            for index, holder in enumerate(ranks):
                y = top + 1.6 + 1.7 * index
                ax.barh(y, width * 0.93, left=left + width * 0.02, height=1.45, color="white", edgecolor=GRID, zorder=2)
                ax.barh(y, 0.008, left=left + width * 0.02, height=1.45, color=SHADES[shades[holder.series]], zorder=3)
                text = f"{holder.label}\n{holder.text}"
                ax.text(left + width * 0.02 + 0.016, y, text, fontsize=8, color=INK, va="center", zorder=4)
        place += 2.0 + 1.7 * tallest
    ax.set_ylim(place, -0.3)
    ax.set_xlim(0, 1)
    ax.set_xticks([])
    ax.set_yticks([])


_DRAWN: dict[type, Callable[[Any, Any, Shades], None]] = {
    Bars: _bars,
    Lines: _lines,
    Curves: _curves,
    Rows: _rows,
    Nodes: _nodes,
}
