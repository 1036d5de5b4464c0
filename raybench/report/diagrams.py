"""The guide's drawings of what is no measurement: rings and trees, and a matrix product cut in two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from raybench.report.png import DPI, GRID, INK, MUTED, SHADES

RING, TREE = 6, 7
MESSAGE_BYTES = [2.0**power for power in range(10, 31)]


def collectives(path: Path) -> Path:
    """A ring, a tree, and what an all-reduce costs on each by the formulas."""
    canvas, (ring, tree, cost) = _canvas(3, 11.0, 3.8)
    _ring(ring)
    _tree(tree)
    _cost(cost, latency_s=20e-6, bandwidth=10e9)
    canvas.savefig(path, dpi=DPI)
    return path


def tensor_parallel(path: Path) -> Path:
    """Two products: the first matrix cut by columns, the second by rows, one all-reduce at the end."""
    canvas, (ax,) = _canvas(1, 9.0, 3.0)
    _blank(ax, "Tensor parallelism over two ranks: columns, then rows, then one all-reduce", 18, 6)
    for rank, (shade, y) in enumerate((("blue", 3.2), ("teal", 0.4))):
        _box(ax, (0, y), (2, 2), "X", "white")
        _box(ax, (3.2, y), (1.2, 2), f"A{rank + 1}\ncolumns", SHADES[shade])
        _box(ax, (5.6, y), (1.2, 2), f"GeLU\nXA{rank + 1}", "white")
        _box(ax, (8.0, y + 0.4), (2, 1.2), f"B{rank + 1} rows", SHADES[shade])
        _box(ax, (11.2, y), (2, 2), f"part {rank + 1}\nof Y", "white")
        for left, right in ((2, 3.2), (4.4, 5.6), (6.8, 8.0), (10.0, 11.2)):
            _arrow(ax, (left, y + 1), (right, y + 1))
        _arrow(ax, (13.2, y + 1), (14.6, 2.8 + 0.4 * (1 - rank)))
        ax.text(-0.3, y + 1, f"rank {rank}", ha="right", va="center", fontsize=9, color=INK)
    _box(ax, (14.6, 2.0), (3, 1.8), "all-reduce:\nY = part 1 + part 2", "#fff8c5")
    canvas.savefig(path, dpi=DPI)
    return path


def _canvas(panels: int, width: float, height: float) -> tuple[Canvas, Sequence[Any]]:
    canvas = Canvas(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(canvas)
    canvas.set_layout_engine("constrained")
    return canvas, canvas.subplots(1, panels, squeeze=False)[0]


def _ring(ax: Any) -> None:
    _blank(ax, "Ring: N − 1 steps to sum, N − 1 to share", 3, 3, left=-3, bottom=-3)
    places = [(2 * math.sin(2 * math.pi * k / RING), 2 * math.cos(2 * math.pi * k / RING)) for k in range(RING)]
    for rank, place in enumerate(places):
        _arrow(ax, place, places[(rank + 1) % RING], shrink=15)
        _rank(ax, place, rank)
    ax.text(0, 0, "each passes\nS/N a step", ha="center", va="center", fontsize=9, color=MUTED)


def _tree(ax: Any) -> None:
    _blank(ax, "Tree: log₂ N levels up, then down", 7, 4, left=-0.8, bottom=-0.8)
    places = [(3.1, 3.0), (1.4, 1.6), (4.8, 1.6), (0.5, 0.2), (2.2, 0.2), (4.0, 0.2), (5.7, 0.2)]
    for rank in range(1, TREE):
        _arrow(ax, places[rank], places[(rank - 1) // 2], shrink=15, both=True)
    for rank, place in enumerate(places):
        _rank(ax, place, rank)


def _cost(ax: Any, *, latency_s: float, bandwidth: float) -> None:
    """Ring: 2 (N − 1) (a + S ÷ (N b)). Tree, pipelined: 2 log₂ N a + 2 S ÷ b."""
    for num_ranks, style in ((8, "-"), (128, (0, (4, 2)))):
        steps = 2 * (num_ranks - 1)
        ring = [steps * (latency_s + size / num_ranks / bandwidth) for size in MESSAGE_BYTES]
        tree = [2 * math.log2(num_ranks) * latency_s + 2 * size / bandwidth for size in MESSAGE_BYTES]
        ax.plot(MESSAGE_BYTES, ring, color=SHADES["blue"], ls=style, label=f"ring, {num_ranks} ranks")
        ax.plot(MESSAGE_BYTES, tree, color=SHADES["orange"], ls=style, label=f"tree, {num_ranks} ranks")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([2.0**10, 2.0**20, 2.0**30], ["1 KiB", "1 MiB", "1 GiB"])
    ax.set_title("Seconds by message, at 20 µs and 10 GB/s", fontsize=9.5, color=INK, loc="left")
    ax.grid(color=GRID, lw=0.7)
    ax.tick_params(labelsize=8, labelcolor=MUTED, length=0)
    ax.legend(fontsize=8, frameon=False, labelcolor=MUTED)
    for side in ax.spines.values():
        side.set_visible(False)


def _blank(ax: Any, title: str, right: float, top: float, *, left: float = -2, bottom: float = -0.2) -> None:
    ax.set_title(title, fontsize=9.5, color=INK, loc="left")
    ax.set_xlim(left, right)
    ax.set_ylim(bottom, top)
    ax.set_aspect("equal")
    ax.axis("off")


def _rank(ax: Any, place: tuple[float, float], rank: int) -> None:
    ax.add_patch(Circle(place, 0.38, facecolor="white", edgecolor=SHADES["blue"], lw=1.5, zorder=2))
    ax.text(*place, str(rank), ha="center", va="center", fontsize=9, color=INK, zorder=3)


def _arrow(
    ax: Any, begin: tuple[float, float], end: tuple[float, float], *, shrink: float = 2, both: bool = False
) -> None:
    style: dict[str, Any] = {"arrowstyle": "<|-|>" if both else "-|>", "mutation_scale": 11, "color": MUTED, "lw": 1.2}
    ax.add_patch(FancyArrowPatch(begin, end, shrinkA=shrink, shrinkB=shrink, **style))


def _box(ax: Any, corner: tuple[float, float], extent: tuple[float, float], text: str, color: str) -> None:
    dark = color not in ("white", "#fff8c5")
    ax.add_patch(Rectangle(corner, *extent, facecolor=color, edgecolor=INK, lw=1))
    middle = corner[0] + extent[0] / 2, corner[1] + extent[1] / 2
    ax.text(*middle, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)
