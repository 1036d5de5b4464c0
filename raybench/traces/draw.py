"""Timelines as SVG paths, in a box of `WIDTH` by `HEIGHT`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raybench.traces.actions import Actions
from raybench.traces.rank import Shares, Timeline

WIDTH = 1000
HEIGHT = 40
MAX_POINTS = 800


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What the template puts into one picture."""

    paths: list[tuple[str, str]]
    """Class and path data, the lowest layer first."""
    label: str
    boxes: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Left edge, width, class and title."""


def bands(timeline: Timeline, begin_ns: int, end_ns: int) -> Drawing:
    """Compute above the middle line, communication below it, its exposed part on top of that."""
    scale = WIDTH / max(end_ns - begin_ns, 1)
    left, right = ((at - begin_ns) * scale for at in (timeline.begin_ns, timeline.end_ns))
    half = HEIGHT / 2
    return Drawing(
        paths=[
            ("compute", _steps(timeline.compute, left, right, half, -half)),
            ("communication", _steps(timeline.communication, left, right, half, half)),
            ("exposed", _steps(timeline.exposed, left, right, half, half)),
        ],
        label="compute above, communication below",
    )


def _steps(shares: Shares, left: float, right: float, base: float, height: float) -> str:
    """A filled step line, points of the same height drawn once."""
    if not shares.any():
        return ""
    width = (right - left) / len(shares)
    corners = [0, *(np.flatnonzero(np.diff(shares)) + 1).tolist()]
    line = "".join(f"H{left + i * width:.1f}V{base + shares[i] * height:.1f}" for i in corners)
    return f"M{left:.1f} {base:g}{line}H{right:.1f}V{base:g}Z"


def curve(memory: NDArray[np.int64]) -> Drawing | None:
    """Allocated bytes over time; of many samples in one place the highest. None without samples."""
    if len(memory) < 2:
        return None
    begin, end, peak = int(memory[0, 0]), int(memory[-1, 0]), int(memory[:, 1].max())
    places = ((memory[:, 0] - begin) * (MAX_POINTS - 1) // max(end - begin, 1)).astype(np.int64)
    highest = np.full(MAX_POINTS, -1, np.int64)
    np.maximum.at(highest, places, memory[:, 1])
    points = np.flatnonzero(highest >= 0)
    x = points * (WIDTH / (MAX_POINTS - 1))
    y = HEIGHT - highest[points] * (HEIGHT / max(peak, 1))
    line = "".join(f"H{px:.1f}V{py:.1f}" for px, py in zip(x.tolist(), y.tolist(), strict=True))
    return Drawing(paths=[("memory", f"M0 {HEIGHT}{line}H{WIDTH}V{HEIGHT}Z")], label=f"peak {peak / 2**20:,.1f} MiB")


def actions(done: Actions, begin_ns: int, end_ns: int) -> Drawing:
    """A rank's pipeline actions between two times."""
    scale = WIDTH / max(end_ns - begin_ns, 1)
    boxes = [
        (
            (a - begin_ns) * scale,
            (b - a) * scale,
            f"action-{kind}",
            f"{max(stage, 0)}{kind}{number}: {(b - a) / 1e6:.3f} ms",
        )
        for kind, stage, number, (a, b) in zip(
            done.kinds, done.stages, done.micro_batches, done.times.tolist(), strict=True
        )
        if a >= begin_ns
    ]
    return Drawing(paths=[], label="pipeline actions", boxes=boxes)
