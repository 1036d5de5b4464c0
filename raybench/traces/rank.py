"""What one rank's trace says; every number is derived in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raybench.traces.actions import Actions, find_actions, phase_times
from raybench.traces.events import Events, Kind
from raybench.traces.intervals import Times, covered, overlap, subtract, total, union
from raybench.traces.kineto import Trace, read_trace
from raybench.traces.operations import Operation, communication_kernels, find_operations, launches_without_times
from raybench.traces.steps import Steps, find_steps, leave_out_last_step

Shares = NDArray[np.float32]

NUM_TOP = 12
"""Kernels or operators listed of a rank."""
NUM_SLICES = 600
"""Points of a timeline."""
MIN_AT_A_TIME = 20
"""Points computed together: of a short trace all at once would take more memory than its events."""
_NO_COMPUTE = ("autograd", "c10d", "torch", "profiler", "raybench", "DistributedDataParallel", "Optimizer")
"""Namespaces of operators that only stand around others."""


@dataclass(frozen=True, kw_only=True)
class Top:
    """A kernel or operator that took much time."""

    name: str
    kind: str
    """compute, memory, or the collective."""
    calls: int
    time_ns: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Shares of equal slices of the traced time."""

    begin_ns: int
    end_ns: int
    compute: Shares
    communication: Shares
    exposed: Shares
    """Of them, communication while nothing computes."""


def no_timeline() -> Timeline:
    """Of what tells no times."""
    none = np.empty(0, np.float32)
    return Timeline(begin_ns=0, end_ns=0, compute=none, communication=none, exposed=none)


@dataclass(kw_only=True)
class RankReport:
    """One rank's numbers; durations in nanoseconds."""

    path: Path
    rank: int | None
    world_size: int | None
    backend: str | None
    device: str | None
    case: Mapping[str, Any]
    on_gpu: bool
    unpacked_bytes: int
    span_ns: int
    idle_ns: int
    compute_ns: int
    """Time in which something computes: the union of compute kernels, or of operators on a CPU."""
    communication_ns: int
    """Time in which at least one operation is under way."""
    overlap_ns: int
    """Of it, while something computes."""
    compute_sum_ns: int
    """Sum over kernels, as for the next two."""
    communication_sum_ns: int
    memory_sum_ns: int
    operations: list[Operation]
    communication_is_known: bool
    """False for NCCL without GPU activities: such a trace holds launches alone."""
    memory: NDArray[np.int64]
    """Rows of time, allocated and reserved bytes, of the GPU where it has any."""
    top: list[Top]
    steps: Steps
    actions: Actions
    phases: Mapping[str, int]
    """Time in forward, backward and optimizer, where annotations tell."""
    timeline: Timeline
    problems: list[str] = field(default_factory=list)


def report_rank(path: Path) -> RankReport:
    """Read and analyse one trace.

    Raises:
        UnreadableTraceError: Nothing in it can be used.
        OSError: The file cannot be read.
    """
    return analyse(read_trace(path))


def analyse(trace: Trace) -> RankReport:
    """All numbers of one trace."""
    events = trace.events
    if not trace.case:  # raybench's own recording holds whole steps alone
        leave_out_last_step(events)
    operations = find_operations(events)
    on_gpu = bool(events.of(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET).size)
    if on_gpu:
        communicating = communication_kernels(events)
        names = set(events.names_of(events.of(Kind.KERNEL))) - set(events.names_of(communicating))
        computing = events.of(Kind.KERNEL, named=names)
        moving = events.of(Kind.MEMCPY, Kind.MEMSET)
        communication = _union(events, communicating)
        busy = _union(events, events.of(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET))
    else:
        computing, moving = _computing_operators(events), np.empty(0, np.intp)
        begins = np.array([o.begin for o in operations], np.int64)
        communication = union(begins, np.array([o.end for o in operations], np.int64))
        busy = _union(events, computing)
        busy = union(*np.concatenate([busy, communication]).T) if communication.size else busy
    compute = _union(events, computing)
    span = int(busy[-1, 1] - busy[0, 0]) if busy.size else 0
    problems = list(trace.problems)
    if (hidden := launches_without_times(events)) and not on_gpu:
        problems.append(f"no GPU activities in it: {hidden} launches of communication, but not its time")
    return RankReport(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        device=trace.device,
        case=trace.case,
        on_gpu=on_gpu,
        unpacked_bytes=trace.unpacked_bytes,
        span_ns=span,
        idle_ns=span - total(busy),
        compute_ns=total(compute),
        communication_ns=total(communication),
        overlap_ns=overlap(communication, compute),
        compute_sum_ns=_sum(events, computing),
        communication_sum_ns=sum(o.duration_ns for o in operations),
        memory_sum_ns=_sum(events, moving),
        operations=operations,
        communication_is_known=on_gpu or not hidden,
        memory=_memory(events, on_gpu),
        top=_top(events, operations, computing, moving, on_gpu),
        steps=find_steps(events, busy),
        actions=find_actions(events, on_gpu),
        phases=phase_times(events),
        timeline=_timeline(compute, communication, busy),
        problems=problems,
    )


def _union(events: Events, rows: NDArray[np.intp]) -> Times:
    return union(events.begin[rows], events.end[rows])


def _sum(events: Events, rows: NDArray[np.intp]) -> int:
    return int((events.end[rows] - events.begin[rows]).sum())


def _computing_operators(events: Events) -> NDArray[np.intp]:
    """Operators that do work themselves, such as `aten::addmm`; not the frames around them."""
    operators = events.of(Kind.CPU_OP)
    working = [
        i
        for i in events.names_of(operators)
        if "::" in events.names[i] and events.names[i].split("::", 1)[0] not in _NO_COMPUTE
    ]
    return events.of(Kind.CPU_OP, named=working)


def _memory(events: Events, on_gpu: bool) -> NDArray[np.int64]:
    """The allocator's steps of the GPU where there are any, else of the CPU, in order of time."""
    rows = events.memory
    gpu = rows[:, 3] > 0
    rows = rows[gpu] if gpu.any() or on_gpu else rows
    return rows[np.argsort(rows[:, 0], kind="stable")][:, :3]


def _top(
    events: Events,
    operations: list[Operation],
    computing: NDArray[np.intp],
    moving: NDArray[np.intp],
    on_gpu: bool,
) -> list[Top]:
    found = [
        *_by_name(events, computing, "compute", self_times=not on_gpu),
        *_by_name(events, moving, "memory", self_times=False),
    ]
    for collective in {o.collective for o in operations}:
        own = [o for o in operations if o.collective == collective]
        time = sum(o.duration_ns for o in own)
        found.append(Top(name=collective, kind="communication", calls=sum(o.calls for o in own), time_ns=time))
    return sorted(found, key=lambda top: top.time_ns, reverse=True)[:NUM_TOP]


def _by_name(events: Events, rows: NDArray[np.intp], kind: str, *, self_times: bool) -> list[Top]:
    if not rows.size:
        return []
    times = _self_times(events, rows) if self_times else events.end[rows] - events.begin[rows]
    sums, calls = np.bincount(events.name[rows], weights=times), np.bincount(events.name[rows])
    longest = np.argsort(-sums, kind="stable")[:NUM_TOP].tolist()
    return [
        Top(name=events.names[i], kind=kind, calls=int(calls[i]), time_ns=int(sums[i])) for i in longest if calls[i]
    ]


def _self_times(events: Events, rows: NDArray[np.intp]) -> Times:
    """Of each event its duration without those of the events inside it, lane by lane."""
    times: Times = events.end[rows] - events.begin[rows]
    order = np.lexsort((-events.end[rows], events.begin[rows], events.lane[rows]))
    lanes, begins, ends = (column[rows][order].tolist() for column in (events.lane, events.begin, events.end))
    durations = times.copy()
    stack: list[int] = []
    for place, index in enumerate(order.tolist()):
        while stack and (lanes[stack[-1]] != lanes[place] or ends[stack[-1]] <= begins[place]):
            stack.pop()
        if stack:
            times[order[stack[-1]]] -= durations[index]
        stack.append(place)
    return np.maximum(times, 0)


def _timeline(compute: Times, communication: Times, busy: Times) -> Timeline:
    begin, end = (int(busy[0, 0]), int(busy[-1, 1])) if busy.size else (0, 0)
    return Timeline(
        begin_ns=begin,
        end_ns=end,
        compute=_shares(compute, begin, end),
        communication=_shares(communication, begin, end),
        exposed=_shares(subtract(communication, compute), begin, end),
    )


def _shares(times: Times, begin: int, end: int) -> Shares:
    """What part of each slice `times` covers; a few slices at a time where they are more than the intervals."""
    shares = np.empty(NUM_SLICES, np.float32)
    at_a_time = max(len(times), MIN_AT_A_TIME)
    for first in range(0, NUM_SLICES, at_a_time):
        last = min(first + at_a_time, NUM_SLICES)
        edges = (np.arange(first, last + 1) * ((end - begin) / NUM_SLICES)).astype(np.int64) + begin
        width = np.maximum(np.diff(edges), 1)
        shares[first:last] = np.round(np.diff(covered(times, edges)) / width, 3)
    return shares
