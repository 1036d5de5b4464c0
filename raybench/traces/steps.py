"""Steps of a trace, and those in which the GPU waited for the host to launch something."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from raybench.traces.events import Events, Kind
from raybench.traces.intervals import Times, within

LAUNCH_BOUND = 0.1
"""A step is launch-bound where the GPU waits for launches for more than this part of it."""
_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d+)$")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps in order; one row each in every array."""

    numbers: list[int]
    windows: Times
    """Shape (steps, 2), nanoseconds on the host."""
    launch_wait_ns: list[int]
    """Time in which nothing ran on the GPU and nothing was launched yet."""
    total_launch_wait_ns: int
    """Of the whole trace."""

    @property
    def launch_bound(self) -> list[int]:
        """Numbers of the steps that are launch-bound."""
        lengths = (self.windows[:, 1] - self.windows[:, 0]).tolist()
        return [
            number
            for number, wait, length in zip(self.numbers, self.launch_wait_ns, lengths, strict=True)
            if wait > LAUNCH_BOUND * length
        ]


def leave_out_last_step(events: Events) -> None:
    """Of several steps, leave out the last one's GPU work, by when it was launched: the profiler stops in that step.

    So does HolisticTraceAnalysis. Work whose launch is not in the trace goes too: it belongs to a step before it.
    """
    steps = events.of(Kind.ANNOTATION, Kind.CPU_OP, named=_numbers(events))
    launches = events.of(Kind.LAUNCH)
    work = events.of(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
    if not work.size or not launches.size or len(events.names_of(steps)) < 2:
        return
    last = events.begin[steps].max()
    known = np.sort(events.correlation[launches[events.begin[launches] < last]])
    place = np.minimum(np.searchsorted(known, events.correlation[work]), max(known.size - 1, 0))
    kept = known[place] == events.correlation[work] if known.size else np.zeros(work.size, bool)
    events.kind[work[~kept]] = Kind.LEFT_OUT
    events.kind[steps[events.begin[steps] == last]] = Kind.LEFT_OUT


def _numbers(events: Events) -> dict[int, int]:
    """Numbers of steps by the row of their name."""
    return {i: int(found[1]) for i, name in enumerate(events.names) if (found := _STEP.match(name)) is not None}


def find_steps(events: Events, busy: Times) -> Steps:
    """Steps by the profiler's annotations, and the waits for launches in them.

    Args:
        events: Of one rank.
        busy: When something runs on the GPU.
    """
    numbers = _numbers(events)
    rows = events.of(Kind.ANNOTATION, Kind.CPU_OP, named=numbers)
    rows = rows[np.argsort(events.begin[rows], kind="stable")]
    waits = _launch_waits(events, busy)
    windows = np.stack([events.begin[rows], events.end[rows]], axis=1)
    return Steps(
        numbers=[numbers[i] for i in events.name[rows].tolist()],
        windows=windows,
        launch_wait_ns=within(waits, windows[:, 0], windows[:, 1]).tolist(),
        total_launch_wait_ns=int((waits[:, 1] - waits[:, 0]).sum()),
    )


def _launch_waits(events: Events, busy: Times) -> Times:
    """Of each gap between kernels, the part before the call that launched what ended it."""
    launches = events.of(Kind.LAUNCH)
    work = events.of(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
    work = work[(events.correlation[work] >= 0) & (events.end[work] > events.begin[work])]
    if len(busy) < 2 or not launches.size or not work.size:
        return np.empty((0, 2), np.int64)
    launches = launches[np.argsort(events.correlation[launches], kind="stable")]
    place = np.searchsorted(events.correlation[launches], events.correlation[work])
    place = np.minimum(place, launches.size - 1)
    known = events.correlation[launches[place]] == events.correlation[work]
    if not known.any():
        return np.empty((0, 2), np.int64)
    work, launched = work[known], events.begin[launches[place[known]]]
    order = np.argsort(events.begin[work], kind="stable")
    begins, launched = events.begin[work][order], launched[order]
    gap_begin, gap_end = busy[:-1, 1], busy[1:, 0]
    first = np.minimum(np.searchsorted(begins, gap_end), begins.size - 1)
    waits: Times = np.stack([gap_begin, np.clip(launched[first], gap_begin, gap_end)], axis=1)
    kept: Times = waits[(begins[first] == gap_end) & (waits[:, 1] > waits[:, 0])]
    return kept


def no_steps() -> Steps:
    """Of a source that tells nothing of steps."""
    return Steps(numbers=[], windows=np.empty((0, 2), np.int64), launch_wait_ns=[], total_launch_wait_ns=0)
