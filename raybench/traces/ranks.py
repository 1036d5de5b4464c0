"""What only several ranks' traces tell together: waiting apart from transfer, stragglers, the pipeline's bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raybench.traces.names import SYNCHRONISING
from raybench.traces.operations import Operation
from raybench.traces.rank import RankReport

MAX_NOTES = 5


@dataclass(kw_only=True)
class Together:
    """What the ranks of one case tell together; lists have an item a rank."""

    last: list[int | None]
    """Operations that a rank began last."""
    waited_for_ns: list[int | None]
    """Time that the other ranks waited for it, mean over them."""
    bubble: list[float | None]
    """Part of the pipeline's window in which a rank does nothing for the pipeline."""
    notes: list[str] = field(default_factory=list)

    @property
    def straggler(self) -> int | None:
        """Index of the rank that the others waited for most; None where waiting is not known or there is none."""
        known = [(time, index) for index, time in enumerate(self.waited_for_ns) if time]
        return max(known)[1] if known else None


def compare(reports: Sequence[RankReport]) -> Together:
    """Match the operations of all ranks of one case, noting in each how long it waited.

    No rank can end an all-reduce (or another of `SYNCHRONISING`) before the last has begun it, and who begins last does
    not wait: the shortest duration of a group is the transfer, and what another rank needs longer is waiting. That
    takes no common clock. The two ends of a send need one, which raybench's own traces have.
    """
    on_one_clock = all(report.case for report in reports)
    matched = [False] * len(reports)
    last = [0] * len(reports)
    waited_for = [0.0] * len(reports)
    notes: list[str] = []
    for group in sorted({o.group for report in reports for o in report.operations}):
        members = [i for i, report in enumerate(reports) if any(o.group == group for o in report.operations)]
        rows = [_in_order(reports[i], group) for i in members]
        if (problem := _cannot_match(group, rows, [reports[i] for i in members])) is not None:
            notes.append(problem)
            continue
        for same in zip(*rows, strict=True):
            if same[0].collective == "p2p" and on_one_clock:
                _wait_for_other_end(same)
            if same[0].collective not in SYNCHRONISING:
                continue
            durations = [o.duration_ns for o in same]
            shortest = min(durations)
            for operation in same:
                operation.waiting_ns = operation.duration_ns - shortest
            if shortest == max(durations):
                continue
            slowest = members[durations.index(shortest)]
            last[slowest] += 1
            waited_for[slowest] += sum(duration - shortest for duration in durations) / (len(members) - 1)
        for member in members:
            matched[member] = True
    more = [f"{len(notes) - MAX_NOTES} more groups likewise"] if len(notes) > MAX_NOTES else []
    return Together(
        last=[count if known else None for count, known in zip(last, matched, strict=True)],
        waited_for_ns=[round(time) if known else None for time, known in zip(waited_for, matched, strict=True)],
        bubble=_bubbles(reports),
        notes=notes[:MAX_NOTES] + more,
    )


def _wait_for_other_end(ends: Sequence[Operation]) -> None:
    """Note in a send and its receive, on one clock, how long each had begun before the other had."""
    begin = max(operation.begin for operation in ends)
    for operation in ends:
        operation.waiting_ns = min(begin - operation.begin, operation.duration_ns)


def _in_order(report: RankReport, group: str) -> list[Operation]:
    return [o for o in report.operations if o.group == group]


def _cannot_match(group: str, rows: list[list[Operation]], members: list[RankReport]) -> str | None:
    """Why the operations of a group cannot be told apart into waiting and transfer; None where they can."""
    said = group or "operations without a group"
    sizes: set[int | None] = {o.group_size for own in rows for o in own if o.group_size is not None}
    if not sizes and not group:
        sizes = {report.world_size for report in members}
    if len(sizes) != 1 or None in sizes:
        return f"{said}: the traces do not tell its size, so waiting is not known"
    (size,) = sizes
    if size == 1:
        return f"{said}: of one rank, nobody to wait for"
    if len(rows) != size:
        return f"{said}: {len(rows)} of {size} ranks are there, so waiting is not known"
    if len({tuple(o.collective for o in own) for own in rows}) > 1:
        return f"{said}: its ranks do not show the same operations in the same order, so waiting is not known"
    return None


def _bubbles(reports: Sequence[RankReport]) -> list[float | None]:
    """Of each rank, the part of the steps' pipeline windows without an action of its own.

    A step's window reaches from the first action of any rank to the last one's end.
    """
    windows: dict[int, tuple[int, int]] = {}
    own_steps: list[set[int]] = []
    for report in reports:
        times = report.actions.times
        steps = _step_of(report, times[:, 0])
        own_steps.append(set(steps))
        for step, (begin, end) in zip(steps, times.tolist(), strict=True):
            known = windows.get(step, (begin, end))
            windows[step] = (min(known[0], begin), max(known[1], end))
    found: list[float | None] = []
    for report, steps_of_rank in zip(reports, own_steps, strict=True):
        length = sum(windows[step][1] - windows[step][0] for step in steps_of_rank)
        busy = sum(report.actions.busy_ns(*windows[step]) for step in steps_of_rank)
        found.append(1 - busy / length if length else None)
    return found


def _step_of(report: RankReport, begins: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """The number of the step that each action begins in; -1 for all where the trace has no steps."""
    if not report.steps.numbers:
        return [-1] * len(begins)
    places = np.searchsorted(report.steps.windows[:, 0], begins, side="right") - 1
    return [report.steps.numbers[max(place, 0)] for place in places.tolist()]


def by_collective(operations: Sequence[Operation]) -> dict[str, list[Operation]]:
    """Operations by what they are."""
    found: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        found[operation.collective].append(operation)
    return dict(found)


def bus_bandwidth(operations: Sequence[Operation]) -> float | None:
    """Bytes a second, of the operations whose size is known; of the transfer alone where waiting is known."""
    known = [(wire, o.duration_ns - (o.waiting_ns or 0)) for o in operations if (wire := o.wire_bytes) is not None]
    time = sum(duration for _, duration in known)
    return sum(wire for wire, _ in known) / (time * 1e-9) if time > 0 else None
