"""Sets of time as sorted, disjoint intervals: numpy arrays of shape (n, 2), int64 nanoseconds, end excluded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


def union(begin: Times, end: Times) -> Times:
    """All time that at least one of the intervals covers; empty and reversed ones cover nothing."""
    some = end > begin
    if not some.all():
        begin, end = begin[some], end[some]
    if begin.size == 0:
        return np.empty((0, 2), np.int64)
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.empty(begin.size, bool)
    first[0] = True
    np.greater(begin[1:], reach[:-1], out=first[1:])
    last = np.append(first[1:], True)
    return np.stack([begin[first], reach[last]], axis=1)


def total(times: Times) -> int:
    """Length in nanoseconds."""
    return int((times[:, 1] - times[:, 0]).sum())


def covered(times: Times, at: Times) -> Times:
    """How much of `times` lies before each of the instants `at`."""
    if times.size == 0:
        return np.zeros(at.shape, np.int64)
    lengths = times[:, 1] - times[:, 0]
    before = np.concatenate([[0], np.cumsum(lengths)])
    index = np.searchsorted(times[:, 0], at, side="right")
    running = np.where(index > 0, times[np.maximum(index - 1, 0), 1] - at, 0)
    covered_before: Times = before[index] - np.maximum(running, 0)
    return covered_before


def within(times: Times, begin: Times, end: Times) -> Times:
    """How much of `times` lies in each interval [begin, end)."""
    return covered(times, end) - covered(times, begin)


def overlap(one: Times, other: Times) -> int:
    """Length of the time that both cover, in nanoseconds."""
    return int(within(other, one[:, 0], one[:, 1]).sum())


def subtract(one: Times, other: Times) -> Times:
    """The time of `one` that `other` does not cover."""
    if one.size == 0 or other.size == 0:
        return one
    edges = np.sort(np.concatenate([one.ravel(), other.ravel()]))
    begin, end = edges[:-1], edges[1:]
    keep = (end > begin) & (within(one, begin, end) > 0) & (within(other, begin, end) == 0)
    return union(begin[keep], end[keep])
