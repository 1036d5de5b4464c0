"""A trace in columns: the events that matter, without what nobody asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from raybench.traces.intervals import Times


class Kind(IntEnum):
    """What an event is, whatever its version of the profiler called it."""

    CPU_OP = 0
    ANNOTATION = 1
    GPU_ANNOTATION = 2
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    LAUNCH = 6
    LEFT_OUT = 7
    """Of a step that the profiler may not have seen whole."""


@dataclass(frozen=True, slots=True)
class Message:
    """What an event says of the communication that it is part of."""

    event: int
    """Its row among the events."""
    collective: str
    """torch's word for it; empty where only the shape is known."""
    in_elements: int
    out_elements: int
    dtype: str
    group_size: int
    """-1: not told, as for the numbers above."""
    group: str
    """Its group's name and description."""


@dataclass(kw_only=True)
class Events:
    """Events in columns, in the order of the file; times in nanoseconds since 1970, or on the trace's own base."""

    names: list[str]
    lanes: list[tuple[int | str, int | str]]
    """Process and thread, or device and stream."""
    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    """Row of `names`."""
    lane: NDArray[np.int32]
    """Row of `lanes`."""
    begin: Times
    end: Times
    correlation: NDArray[np.int64]
    """Joins a launch and what it launched; -1: none."""
    messages: list[Message]
    memory: NDArray[np.int64]
    """Rows of time, allocated bytes, reserved bytes, and the type of the device (0: CPU)."""
    counts: dict[str, int] = field(default_factory=dict)
    """What had to be left out or corrected, in words, and how often."""

    def of(self, *kinds: Kind, named: Iterable[int] | None = None) -> NDArray[np.intp]:
        """Rows of these kinds, or only of those with these names (rows of `names`)."""
        chosen = _table(len(Kind), kinds)[self.kind]
        if named is not None:
            chosen &= _table(len(self.names), named)[self.name]
        return np.flatnonzero(chosen)

    def names_of(self, rows: NDArray[np.intp]) -> list[int]:
        """The different names of some rows, as rows of `names`."""
        return different(self.name[rows])


def different(values: NDArray[np.int32]) -> list[int]:
    """The different ones of small numbers from 0, in order."""
    found: list[int] = np.flatnonzero(np.bincount(values)).tolist()
    return found


def _table(size: int, members: Iterable[int]) -> NDArray[np.bool_]:
    table = np.zeros(size, bool)
    table[list(members)] = True
    return table
