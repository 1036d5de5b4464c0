"""Where the time of a step goes: the five parts of the instrumented steps of one round, which sum to the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Intervals = Floats
"""Rows of (begin, end)."""

PARTS = ("compute", "communication", "waiting", "optimizer", "other")
COLUMNS = ("rank", "step", "kind", "axis", "begin_ns", "end_ns", "wait_ns", "exposed_ns")
STEP, OPTIMIZER = "step", "optimizer"


@dataclass(frozen=True)
class Split:
    """Shares of the step, means over ranks and instrumented steps; they sum to 1."""

    compute: float | None
    """Forward and backward passes, without what follows; None where the store holds operations alone."""
    communication: float
    """Exposed, once every rank of the group was there."""
    waiting: float
    """Exposed, before the last rank of the group had begun."""
    optimizer: float | None
    other: float
    """The rest: clipping, norms, launching; everything but communication where the store holds operations alone."""

    @property
    def exposed(self) -> float:
        return self.communication + self.waiting


@dataclass(frozen=True)
class _Rows:
    """The rows of `operations` of one round as arrays."""

    rank: Integers
    step: Integers
    kind: npt.NDArray[np.object_]
    is_operation: npt.NDArray[np.bool_]
    """Whether it is communication, not a span of the rank's own work."""
    begin: Floats
    end: Floats
    exposed: Floats
    waiting: Floats

    def groups(self) -> Iterator[tuple[tuple[int, int], Integers]]:
        """(rank, step) and the places of its rows."""
        order = np.lexsort([self.step, self.rank])
        rank, step = self.rank[order], self.step[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(rank) != 0) | (np.diff(step) != 0)])
        for place in np.split(order, starts[1:]):
            yield (int(self.rank[place[0]]), int(self.step[place[0]])), place


def split_round(operations: Any, durations: dict[tuple[int, int], float], mean_step_ns: float) -> Split | None:
    """The split of one round; None where its communication was not recorded.

    Args:
        operations: its rows with `COLUMNS`, as an Arrow table.
        durations: nanoseconds of steps by (rank, step) for stores without spans; steps that it lacks took
            `mean_step_ns`.
    """
    if operations is None or not operations.num_rows:
        return None
    rows = _read(operations)
    has_spans = bool((rows.kind == STEP).any())
    if not has_spans and not np.isfinite(rows.exposed).any():
        return None
    shares = []
    for key, place in rows.groups():
        duration = durations.get(key, mean_step_ns)
        if has_spans:
            whole = rows.kind[place] == STEP
            duration = float((rows.end - rows.begin)[place][whole].sum())
        if not np.isfinite(duration) or duration <= 0:
            continue
        shares.append(_parts(rows, place) / duration)
    if not shares:
        return None
    compute, exposed, waiting, optimizer = (float(v) for v in np.mean(shares, axis=0))
    other = 1 - exposed - (compute + optimizer if has_spans else 0)
    return Split(compute if has_spans else None, exposed - waiting, waiting, optimizer if has_spans else None, other)


def _parts(rows: _Rows, place: Integers) -> Floats:
    """Compute, exposed, waiting and optimizer time of one rank in one step."""
    begin, end, kind = rows.begin[place], rows.end[place], rows.kind[place]
    own = ~rows.is_operation[place]
    exposed = np.nan_to_num(rows.exposed[place])
    stands = np.stack([end - exposed, end], axis=1)[~own & (exposed > 0)]
    times = np.stack([begin, end], axis=1)
    updates = np.concatenate([stands, times[own & (kind == OPTIMIZER)]])
    passes = np.concatenate([updates, times[own & (kind != OPTIMIZER) & (kind != STEP)]])
    standing, updating, computing = covered(stands), covered(updates), covered(passes)
    return np.array([computing - updating, exposed.sum(), rows.waiting[place].sum(), updating - standing])


def covered(intervals: Intervals) -> float:
    """Length of the union of intervals, rows of (begin, end); those with an unknown end count nothing."""
    intervals = intervals[np.isfinite(intervals).all(axis=1)]
    if not len(intervals):
        return 0.0
    begin, end = intervals[np.argsort(intervals[:, 0])].T
    reached = np.maximum.accumulate(np.r_[-np.inf, end[:-1]])
    return float(np.clip(end - np.maximum(begin, reached), 0, None).sum())


def waiting_ns(begin: Floats, end: Floats, wait: Floats, exposed: Floats) -> Floats:
    """Of each operation's exposed time, the part before the last rank of its group had begun.

    The last rank began `wait` after this one; only what then was still ahead of its own waiting call is exposed.
    """
    early = np.nan_to_num(wait) - ((end - begin) - np.nan_to_num(exposed))
    return np.nan_to_num(np.clip(early, 0, np.nan_to_num(exposed)))


def _read(operations: Any) -> _Rows:
    begin, end, wait, exposed = (_floats(operations, n) for n in ("begin_ns", "end_ns", "wait_ns", "exposed_ns"))
    return _Rows(
        rank=np.asarray(operations.column("rank").to_numpy(), dtype=np.int64),
        step=np.asarray(operations.column("step").to_numpy(), dtype=np.int64),
        kind=np.asarray(operations.column("kind").to_pylist(), dtype=object),
        is_operation=np.asarray(pc.is_valid(operations.column("axis")).to_numpy(), dtype=np.bool_),
        begin=begin,
        end=end,
        exposed=exposed,
        waiting=waiting_ns(begin, end, wait, exposed),
    )


def _floats(piece: Any, column: str) -> Floats:
    return np.asarray(piece.column(column).to_numpy(), dtype=np.float64)
