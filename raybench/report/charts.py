"""What a figure shows, as data: drawn as PNG by `png.py` and as vector graphics in the page by `svg.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["own", "peer", "bad", "muted", "published"]

COLORS: Mapping[str, str] = {
    "parameters": "blue",
    "gradients": "teal",
    "optimizer": "purple",
    "activations": "yellow",
    "compute": "teal",
    "communication": "blue",
    "waiting": "orange",
    "other": "grey",
    "forward": "teal",
    "backward": "green",
    "input gradient": "pink",
    "weight gradient": "yellow",
    "all_reduce": "blue",
    "reduce_scatter": "teal",
    "all_gather": "green",
    "all_to_all": "purple",
    "broadcast": "yellow",
    "send": "orange",
    "send_receive": "red",
}
"""Colour of a series that means the same in every figure; the rest take turns."""
TURNS = ("blue", "orange", "teal", "purple", "yellow", "green", "pink", "red", "grey")


@dataclass(frozen=True)
class Bar:
    """One case. Without parts there is nothing to show, and the text says why."""

    label: str
    text: str
    parts: tuple[tuple[str, float], ...] = ()
    """Series and value, from left to right."""
    low: float | None = None
    high: float | None = None
    """Interval of their sum."""
    tone: Tone = "own"

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    tick: Callable[[float], str]
    """A value on the axis as text."""
    mark: float | None = None
    """A value that a line goes through, such as perfect scaling."""
    binary: bool = False
    """Whether ticks stand at powers of two."""

    @property
    def series(self) -> tuple[str, ...]:
        """Names for a legend; none where every bar is a single value."""
        names = tuple(dict.fromkeys(name for bar in self.bars for name, _ in bar.parts))
        return names if len(names) > 1 else ()

    @property
    def reach(self) -> float:
        """The largest value to be drawn. Intervals wider than half the longest bar are cut: they say nothing."""
        longest = max((bar.total for bar in self.bars), default=0.0)
        ends = [min(bar.high, 1.5 * longest) for bar in self.bars if bar.high is not None and bar.parts]
        return max([longest, *ends, *([] if self.mark is None else [1.02 * self.mark])]) or 1.0


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves over a common axis."""

    title: str
    unit: str
    x_unit: str
    lines: tuple[Line, ...]

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.label for line in self.lines))

    @property
    def widths(self) -> tuple[float, ...]:
        """Of each line, the first the widest: where curves are equal all of them are seen."""
        step = min(3.0, 9 / max(len(self.lines) - 1, 1))
        return tuple(2 + step * place for place in reversed(range(len(self.lines))))


@dataclass(frozen=True)
class Curves:
    """Measured points, joined, over two logarithmic axes."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    x_tick: Callable[[float], str]
    y_tick: Callable[[float], str]
    mark: float | None = None
    """A value that a level line goes through, such as the speed of a link."""

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.label for line in self.lines))

    @property
    def x_ends(self) -> tuple[float, float]:
        values = [x for line in self.lines for x, _ in line.points]
        return (min(values), max(values)) if min(values) < max(values) else (values[0] / 2, values[0] * 2)

    @property
    def y_ends(self) -> tuple[float, float]:
        """At least a decade: less would make much of noise."""
        values = [y for line in self.lines for _, y in line.points] + ([] if self.mark is None else [self.mark])
        low, high = min(values) / 1.2, max(values) * 1.2
        widened = max(1.0, math.sqrt(10 * low / high))
        return low / widened, high * widened


@dataclass(frozen=True)
class Stretch:
    """A block on the time axis, in seconds."""

    series: str
    begin: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class Row:
    """One rank: blocks in two layers, the thin one below."""

    label: str
    thick: tuple[Stretch, ...]
    thin: tuple[Stretch, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Ranks over one step, a group a case."""

    title: str
    unit: str
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    thin_series: str = "communication under way"

    @property
    def reach(self) -> float:
        """Seconds: all groups share one axis, so that they can be compared."""
        ends = (block.end for _, rows in self.groups for row in rows for block in (*row.thick, *row.thin))
        return max(ends, default=1.0)

    @property
    def series(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(block.series for _, rows in self.groups for row in rows for block in row.thick))


@dataclass(frozen=True)
class Holder:
    """One rank and what it holds."""

    label: str
    text: str
    series: str


@dataclass(frozen=True)
class Nodes:
    """Who holds what on which node, a group a layout."""

    title: str
    unit: str
    groups: tuple[tuple[str, tuple[tuple[str, tuple[Holder, ...]], ...]], ...]
    """(layout, nodes), of each node (name, its ranks)."""

    @property
    def series(self) -> tuple[str, ...]:
        holders = (holder for _, nodes in self.groups for _, ranks in nodes for holder in ranks)
        return tuple(dict.fromkeys(holder.series for holder in holders))


Chart = Bars | Lines | Curves | Rows | Nodes


@dataclass(frozen=True)
class Figure:
    """One subject, a chart a track."""

    name: str
    """Stem of its file."""
    title: str
    alternative: str
    """What it shows, for those who cannot see it."""
    charts: tuple[tuple[str, Chart, str], ...]
    """(track, chart, the hardware, scale and gate that it rests on)."""

    @property
    def colors(self) -> dict[str, str]:
        """Of every series of its charts, by name."""
        return colors([chart.series for _, chart, _ in self.charts])


def colors(charts: Sequence[Sequence[str]]) -> dict[str, str]:
    """A colour for each series of some charts, by name: the same in all of them, another than those beside it."""
    names = list(dict.fromkeys(name for series in charts for name in series))
    found = {name: COLORS[name] for name in names if name in COLORS}
    for name in names:
        if name not in found:
            beside = {found[other] for series in charts if name in series for other in series if other in found}
            taken = list(found.values())
            found[name] = min(TURNS, key=lambda color: (color in beside, taken.count(color)))
    return found


def decimals(extent: float) -> int:
    """Digits after the point with which numbers on an axis of this extent differ."""
    return max(0, 2 - math.floor(math.log10(extent))) if extent > 0 else 3


def ticks(reach: float, *, binary: bool = False) -> list[float]:
    """Three to six round values from zero, the last within `reach`."""
    if binary:
        step = 2.0 ** math.ceil(math.log2(reach / 6))
    else:
        size = 10.0 ** math.floor(math.log10(reach / 3))
        step = max(factor * size for factor in (1, 2, 5) if factor * size <= reach / 3)
    return [step * number for number in range(int(reach / step + 1e-9) + 1)]


def log_ticks(ends: tuple[float, float], *, binary: bool = False) -> list[float]:
    """At most six round values on a logarithmic axis: powers, and where there are few of ten what lies between them."""
    base = 2 if binary else 10
    first, last = (math.log(end, base) for end in ends)
    first, last = math.ceil(first - 1e-9), math.floor(last + 1e-9)
    powers = [float(base) ** power for power in range(first, last + 1, max(1, -(-(last - first + 1) // 6)))]
    if binary or len(powers) > 2:
        return powers
    between = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    return [value for value in between if ends[0] <= value <= ends[1]]
