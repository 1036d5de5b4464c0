"""Charts as vector graphics for the page: widths in percent, text in pixels, so that it stays readable at any width.

Colours are classes of the page's style sheet, which knows light and dark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from math import log
from textwrap import wrap
from typing import Any

from markupsafe import Markup, escape

from raybench.report.charts import (
    Bar,
    Bars,
    Chart,
    Curves,
    Line,
    Lines,
    Nodes,
    Row,
    Rows,
    Stretch,
    decimals,
    log_ticks,
    ticks,
)

BAR_ROW, BAR_TOP, BAR_HEIGHT = 54, 20, 16
"""The room under a bar is for its text, which the style sheet moves there on narrow screens."""
AXIS = 22
LINES_HEIGHT, CURVES_HEIGHT = 260, 300
CURVES_LEFT, CURVES_WIDTH = 0.13, 0.83
"""Left of the curves stand the values of their axis."""
LANE_ROW, LANE_TOP, LANE_HEIGHT, THIN_HEIGHT = 44, 16, 16, 5
HOLDER_ROW = 58
Shades = Mapping[str, str]
NARROW = 48
"""Characters that a phone shows in a line."""


def draw(chart: Chart, shades: Shades, identity: str, title: str, alternative: str) -> Markup:
    """A chart as one `svg` element with a title and a description for those who cannot see it.

    Args:
        shades: colour of each of its series.
        identity: unique in the page.
    """
    body, height = _DRAWN[type(chart)](chart, shades)
    return _element(
        "svg",
        {
            "role": "img",
            "aria-labelledby": f"{identity}-t {identity}-d",
            "width": "100%",
            "height": f"{height}",
        },
        Markup("").join(
            [
                _element("title", {"id": f"{identity}-t"}, escape(title)),
                _element("desc", {"id": f"{identity}-d"}, escape(alternative)),
                *body,
            ]
        ),
    )


def _bars(chart: Bars, shades: Shades) -> tuple[list[Markup], int]:
    reach = chart.reach
    named = shades if chart.series else {}
    height = BAR_ROW * len(chart.bars)
    parts = list(_grid(chart, reach, height))
    for place, bar in enumerate(chart.bars):
        top = BAR_ROW * place
        parts += [_text(0, top + 14, bar.label, "label"), _text(100, top + 14, bar.text, f"value {bar.tone}")]
        start = 0.0
        for name, value in bar.parts:
            shade = named.get(name, bar.tone)
            parts.append(_block(start / reach, value / reach, top + BAR_TOP, BAR_HEIGHT, f"c-{shade}", name))
            start += value
        parts += _interval(bar, reach, top + BAR_TOP + BAR_HEIGHT / 2)
    if chart.mark is not None:
        parts.append(_vertical(chart.mark / reach, 0, height, "mark"))
    return parts, height + AXIS


def _grid(chart: Bars, reach: float, height: float) -> Iterator[Markup]:
    for value in ticks(reach, binary=chart.binary):
        share = value / reach
        yield _vertical(share, 0, height, "grid")
        anchor = "start" if share < 0.06 else "end" if share > 0.94 else "middle"
        yield _text(100 * share, height + 15, chart.tick(value), f"tick {anchor}")


def _interval(bar: Bar, reach: float, middle: float) -> Iterator[Markup]:
    if bar.low is None or bar.high is None:
        return
    low, high = max(bar.low, 0.0) / reach, min(bar.high, reach) / reach
    yield _line(low, middle, high, middle, "arm")
    for end in (low, high):
        yield _line(end, middle - 5, end, middle + 5, "arm")


def _lines(chart: Lines, shades: Shades) -> tuple[list[Markup], int]:
    points = [point for line in chart.lines for point in line.points]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    bottom, top = min(y for _, y in points), max(y for _, y in points)
    width, rise = (right - left) or 1.0, (top - bottom) or 1.0
    inner = LINES_HEIGHT - AXIS - 16
    digits = decimals(top - bottom)
    parts = []
    for share in (0.0, 0.5, 1.0):
        height = 16 + inner * (1 - share)
        parts += [
            _line(0, height, 1, height, "grid"),
            _text(0, height - 3, f"{bottom + rise * share:,.{digits}f}", "tick"),
        ]
    curves = [
        _curve(line, shades[line.label], thickness, (left, bottom), (width, rise))
        for line, thickness in zip(chart.lines, chart.widths, strict=True)
    ]
    box = {"x": "0", "y": "16", "width": "100%", "height": f"{inner}", "viewBox": "0 0 1000 1000"}
    parts.append(_element("svg", box | {"preserveAspectRatio": "none"}, Markup("").join(curves)))
    parts.append(_text(0, LINES_HEIGHT - 4, f"{chart.x_unit} {left:g}", "tick"))
    parts.append(_text(100, LINES_HEIGHT - 4, f"{right:g}", "tick end"))
    return parts, LINES_HEIGHT


def _curve(
    line: Line, shade: str, thickness: float, origin: tuple[float, float], extent: tuple[float, float]
) -> Markup:
    places = " ".join(
        f"{1000 * (x - origin[0]) / extent[0]:.1f},{1000 - 1000 * (y - origin[1]) / extent[1]:.1f}"
        for x, y in line.points
    )
    kind = f"curve s-{shade}{' dashed' if line.dashed else ''}"
    return _element("polyline", {"points": places, "class": kind, "stroke-width": f"{thickness:g}"})


def _curves(chart: Curves, shades: Shades) -> tuple[list[Markup], int]:
    inner = CURVES_HEIGHT - AXIS - 8

    def across(x: float) -> float:
        return CURVES_LEFT + CURVES_WIDTH * _share(x, chart.x_ends)

    def down(y: float) -> float:
        return 4 + inner * (1 - _share(y, chart.y_ends))

    parts = []
    for value in log_ticks(chart.y_ends):
        parts += [
            _line(CURVES_LEFT, down(value), 1, down(value), "grid"),
            _text(100 * (CURVES_LEFT - 0.01), down(value) + 4, chart.y_tick(value), "tick end"),
        ]
    for value in log_ticks(chart.x_ends, binary=True):
        parts += [
            _vertical(across(value), 4, 4 + inner, "grid"),
            _text(100 * across(value), CURVES_HEIGHT - 6, chart.x_tick(value), "tick middle"),
        ]
    if chart.mark is not None:
        parts.append(_line(CURVES_LEFT, down(chart.mark), 1, down(chart.mark), "mark"))
    for line in chart.lines:
        kind = f"joint s-{shades[line.label]}{' dashed' if line.dashed else ''}"
        places = [(across(x), down(y)) for x, y in line.points]
        parts += [_line(*start, *end, kind) for start, end in pairwise(places)]
        for (x, y), (left, top) in zip(line.points, places, strict=True):
            point = {"cx": f"{100 * left:.3f}%", "cy": f"{top:.1f}", "r": "2.5", "class": f"c-{shades[line.label]}"}
            told = escape(f"{line.label}: {chart.x_tick(x)}, {chart.y_tick(y)}")
            parts.append(_element("circle", point, _element("title", {}, told)))
    return parts, CURVES_HEIGHT


def _share(value: float, ends: tuple[float, float]) -> float:
    """Where it stands on a logarithmic axis."""
    return log(value / ends[0]) / log(ends[1] / ends[0])


def _rows(chart: Rows, shades: Shades) -> tuple[list[Markup], int]:
    reach = chart.reach
    parts: list[Markup] = []
    top = 0
    for name, rows in chart.groups:
        parts.append(_text(0, top + 14, name, "label"))
        top += 20
        for row in rows:
            parts += [*_lane(row, top, reach, shades)]
            top += LANE_ROW
    for value in ticks(reach):
        anchor = "start" if value < 0.06 * reach else "end" if value > 0.94 * reach else "middle"
        parts.append(_text(100 * value / reach, top + 15, f"{value * 1e3:,.4g}", f"tick {anchor}"))
    return parts, top + AXIS


def _lane(row: Row, top: float, reach: float, shades: Shades) -> Iterator[Markup]:
    yield _text(0, top + 11, row.label, "tick")
    yield _block(0, 1, top + LANE_TOP, LANE_HEIGHT, "lane")
    for series in dict.fromkeys(stretch.series for stretch in row.thick):
        own = [stretch for stretch in row.thick if stretch.series == series]
        yield _blocks(own, top + LANE_TOP, LANE_HEIGHT, reach, shades[series])
    if row.thin:
        yield _blocks(row.thin, top + LANE_TOP + LANE_HEIGHT + 1, THIN_HEIGHT, reach, "blue")


def _blocks(stretches: Iterable[Stretch], top: float, height: float, reach: float, shade: str) -> Markup:
    """Many blocks of one colour as one path, which is a tenth of as many rectangles."""
    drawn = [(1000 * one.begin / reach, max(1000 * (one.end - one.begin) / reach, 0.8)) for one in stretches]
    path = "".join(f"M{left:.1f} 0h{width:.1f}v1h-{width:.1f}z" for left, width in drawn)
    box = {"x": "0", "y": f"{top:g}", "width": "100%", "height": f"{height:g}", "viewBox": "0 0 1000 1"}
    inside = _element("path", {"d": path, "class": f"c-{shade}"})
    return _element("svg", box | {"preserveAspectRatio": "none"}, inside)


def _nodes(chart: Nodes, shades: Shades) -> tuple[list[Markup], int]:
    parts: list[Markup] = []
    top = 0
    for name, nodes in chart.groups:
        layout, _, cases = name.partition(": ")
        parts.append(_text(0, top + 14, layout, "label"))
        top += 18
        for line in wrap(cases, NARROW):
            parts.append(_text(0, top + 13, line, "tick"))
            top += 15
        top += 5
        tallest = max(len(ranks) for _, ranks in nodes)
        width = 1 / len(nodes)
        for place, (node, ranks) in enumerate(nodes):
            left = place * width
            inside = width * 0.94
            parts.append(_block(left, width * 0.98, top, 24 + HOLDER_ROW * tallest, "node"))
            parts.append(_text(100 * (left + width * 0.02), top + 16, node, "tick"))
            for index, holder in enumerate(ranks):
                y = top + 24 + HOLDER_ROW * index
                parts.append(_block(left + width * 0.02, inside, y, HOLDER_ROW - 6, "holder"))
                parts.append(_block(left + width * 0.02, width * 0.02, y, HOLDER_ROW - 6, f"c-{shades[holder.series]}"))
                x = 100 * (left + width * 0.06)
                parts.append(_text(x, y + 16, holder.label, "label"))
                parts += [_text(x, y + 31 + 13 * n, part, "tick") for n, part in enumerate(_wrapped(holder.text))]
        top += 24 + HOLDER_ROW * tallest + 12
    return parts, top


def _wrapped(text: str) -> list[str]:
    """In at most two lines, at a comma near the middle."""
    parts = text.split(", ")
    if len(parts) == 1:
        return parts
    half = (len(parts) + 1) // 2
    return [", ".join(parts[:half]), ", ".join(parts[half:])]


_DRAWN: dict[type, Callable[[Any, Shades], tuple[list[Markup], int]]] = {
    Bars: _bars,
    Lines: _lines,
    Curves: _curves,
    Rows: _rows,
    Nodes: _nodes,
}


def _block(left: float, width: float, top: float, height: float, kind: str, name: str = "") -> Markup:
    """A rectangle; `left` and `width` are shares of the whole."""
    attributes = {
        "x": f"{100 * left:.3f}%",
        "y": f"{top:g}",
        "width": f"{100 * max(width, 0):.3f}%",
        "height": f"{height:g}",
        "class": kind,
    }
    return _element("rect", attributes, _element("title", {}, escape(name)) if name else Markup(""))


def _line(left: float, top: float, right: float, bottom: float, kind: str) -> Markup:
    ends = {"x1": f"{100 * left:.3f}%", "y1": f"{top:g}", "x2": f"{100 * right:.3f}%", "y2": f"{bottom:g}"}
    return _element("line", ends | {"class": kind})


def _vertical(share: float, top: float, bottom: float, kind: str) -> Markup:
    return _line(share, top, share, bottom, kind)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return _element("text", {"x": f"{x:.3f}%", "y": f"{y:g}", "class": kind}, escape(text))


def _element(name: str, attributes: dict[str, str], body: Markup | None = None) -> Markup:
    written = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in attributes.items())
    return Markup("<{}{}>{}</{}>").format(Markup(name), written, body or Markup(""), Markup(name))
