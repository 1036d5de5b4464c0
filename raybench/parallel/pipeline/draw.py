"""Schedules and timelines for the eye: a text grid, a listing that marks faults, and a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.parallel.pipeline.actions import Action, Kind, Schedule
from raybench.parallel.pipeline.check import Fault
from raybench.parallel.pipeline.simulate import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of a kind, for a rank's first chunk and for its last; those between are mixed.
COLOURS: dict[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("#3b6fb6", "#a9c8ec"),
    Kind.BACKWARD: ("#c8553d", "#f0b6a2"),
    Kind.INPUT_GRADIENT: ("#c8553d", "#f0b6a2"),
    Kind.WEIGHT_GRADIENT: ("#4d9167", "#b5dcc0"),
}
LEGEND: dict[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
INK, IDLE, RULE = "#1f2933", "#eef0f3", "#c5cbd3"
SMALL = 8.5  # points, of all text but titles


def listing(schedule: Schedule, faults: Sequence[Fault] = ()) -> str:
    """Every rank's actions in order; a faulty one stands between `>` and `<`, and the reason below."""
    marked = {(fault.rank, fault.index) for fault in faults}
    rows = [
        [f">{action}<" if (rank, index) in marked else str(action) for index, action in enumerate(actions)]
        for rank, actions in enumerate(schedule.actions)
    ]
    width = max((len(cell) for row in rows for cell in row), default=0)
    lines = [f"rank {rank}  " + " ".join(cell.ljust(width) for cell in row).rstrip() for rank, row in enumerate(rows)]
    return "\n".join([*lines, *(str(fault) for fault in faults)])


def grid(timeline: Timeline, *, width: int = 120) -> str:
    """Ranks by time, in blocks of at most `width` columns: actions as long as they take, idle as dots."""
    labels = [[_label(event.action, timeline.num_chunks) for event in events] for events in timeline.events]
    cell = max(len(label) for row in labels for label in row) + 1
    durations = [event.end - event.begin for events in timeline.events for event in events]
    shortest, longest = min(duration for duration in durations if duration > 0), max(durations)
    scale = cell / max(shortest, longest / 8)  # columns a second; much shorter actions lose their label
    heads = [f"rank {rank} |" for rank in range(len(timeline.events))]
    indent = max(map(len, heads))
    rows = [_row(events, row, timeline, scale) for events, row in zip(timeline.events, labels, strict=True)]
    columns = max(cell, (width - indent) // cell * cell)
    blocks = []
    for start in range(0, max(map(len, rows)), columns):
        ruler = f"{(timeline.begin + start / scale) * 1e3:.6g} ms"
        lines = [" " * indent + ruler]
        lines += [
            head.rjust(indent) + row[start : start + columns].rstrip() for head, row in zip(heads, rows, strict=True)
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _label(action: Action, num_chunks: int) -> str:
    """A rank with one stage needs no stage in its cells."""
    return str(action) if num_chunks > 1 else f"{action.kind}{action.micro_batch}"


def _row(events: Sequence[Event], labels: Sequence[str], timeline: Timeline, scale: float) -> str:
    """One rank as text: `F0 B0--- .. F1 `, with a blank between neighbours."""
    row = ""
    for event, label in zip(events, labels, strict=True):
        begin = round((event.begin - timeline.begin) * scale)
        end = round((event.end - timeline.begin) * scale)
        row += _fill(begin - len(row), "", ".")
        row += _fill(end - len(row), label, "-")
    return row + _fill(round(timeline.step_time * scale) - len(row), "", ".")


def _fill(columns: int, label: str, filler: str) -> str:
    return (label[: columns - 1].ljust(columns - 1, filler) + " ") if columns > 0 else ""


def draw(timeline: Timeline, ax: Axes, *, title: str | None = None, end_s: float | None = None) -> None:
    """Draw a timeline into `ax`: ranks as rows, the micro-batch in each cell, idle time as bare ground.

    `end_s` is where the time axis ends, so that several timelines can share a scale.
    """
    end_ms = (end_s or timeline.step_time) * 1e3
    points_per_ms = ax.get_window_extent().width / ax.figure.dpi * 72 / end_ms
    for rank, events in enumerate(timeline.events):
        row = (rank - 0.43, 0.86)
        ax.broken_barh([(0, timeline.step_time * 1e3)], row, color=IDLE, zorder=1)
        stages = sorted({event.action.stage for event in events})
        colours = [cell_colour(event.action.kind, stages.index(event.action.stage), len(stages)) for event in events]
        spans = [((event.begin - timeline.begin) * 1e3, (event.end - event.begin) * 1e3) for event in events]
        ax.broken_barh(spans, row, facecolors=colours, edgecolor="white", linewidth=0.8, zorder=2)
        for event, colour, (begin, width) in zip(events, colours, spans, strict=True):
            text = str(event.action.micro_batch)
            if width * points_per_ms > 5.2 * len(text) + 1:
                centre: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": SMALL}
                ax.text(begin + width / 2, rank, text, color=_ink_on(colour), zorder=3, **centre)
        idle = 1 - timeline.busy(rank) / timeline.step_time
        _beside(ax, f"{idle:.1%}", rank, va="center")
    _beside(ax, "idle", -0.6, va="bottom")
    ax.set(xlim=(0, end_ms), ylim=(len(timeline.events) - 0.45, -0.55), yticks=range(len(timeline.events)))
    ax.yaxis.set_major_formatter("rank {x:.0f}")
    ax.xaxis.set_major_formatter("{x:g} ms")
    ax.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
    ax.spines[:].set_visible(False)
    ax.set_title(title or _title(timeline), loc="left", fontsize=11, color=INK, pad=9)


def _beside(ax: Axes, text: str, row: float, *, va: str) -> None:
    """A word to the right of a row."""
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (8, 0), "textcoords": "offset points"}
    ax.annotate(text, (1, row), va=va, fontsize=SMALL, color=INK, **place)


def _title(timeline: Timeline) -> str:
    micro_batches = len({event.action.micro_batch for event in timeline.events[0]})
    chunks = f" × {timeline.num_chunks} chunks" if timeline.num_chunks > 1 else ""
    return (
        f"{timeline.name}: {len(timeline.events)} ranks{chunks}, {micro_batches} micro-batches"
        f" · step {timeline.step_time:.3f} s · bubble {timeline.bubble:.1%}"
    )


def cell_colour(kind: Kind, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """A kind's colour, lighter from a rank's first chunk to its last."""
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    dark, light = (tuple(int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)) for text in COLOURS[kind])
    red, green, blue = (a + (b - a) * share for a, b in zip(dark, light, strict=True))
    return red, green, blue


def _ink_on(colour: tuple[float, float, float]) -> str:
    red, green, blue = colour
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.58 else "white"


def save_png(timelines: Timeline | Sequence[Timeline], path: str | Path, *, titles: Sequence[str | None] = ()) -> None:
    """A PNG file of one timeline, or of several on one time axis (simulated above measured)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    end_s = max(timeline.step_time for timeline in drawn)
    most_cells = max(len(events) for timeline in drawn for events in timeline.events)
    width = min(30.0, max(9.0, 2.0 + 0.27 * most_cells))  # inches
    rooms = [0.36 * len(timeline.events) + 0.78 for timeline in drawn]  # rows, a title, ticks
    height = sum(rooms) + 0.34
    figure = Figure(figsize=(width, height), dpi=150)
    top = height
    for timeline, room, title in zip(drawn, rooms, [*titles, *[None] * len(drawn)], strict=False):
        top -= room
        position = (0.75 / width, (top + 0.34) / height, (width - 1.4) / width, (room - 0.78) / height)
        draw(timeline, figure.add_axes(position), title=title, end_s=end_s)
    kinds = {event.action.kind for timeline in drawn for events in timeline.events for event in events}
    patches = [Patch(color=cell_colour(kind, 0, 1), label=LEGEND[kind]) for kind in LEGEND if kind in kinds]
    if any(timeline.num_chunks > 1 for timeline in drawn):
        patches.append(Patch(color=cell_colour(Kind.FORWARD, 1, 2), label="lighter: a rank's later chunk"))
    patches.append(Patch(facecolor=IDLE, edgecolor=RULE, label="idle"))
    figure.legend(
        handles=patches,
        ncols=len(patches),
        loc="lower left",
        bbox_to_anchor=(0.62 / width, 0.0),
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
        handlelength=1.2,
        handleheight=1.0,
    )
    figure.savefig(path, format="png", facecolor="white")
