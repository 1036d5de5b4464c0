"""The communication in a trace: one row an operation, wherever its name, size and group are told.

On a GPU an operation is a kernel. What it is stands, in this order, in its arguments (torch 2.4 on), in its name, or
in the annotation around it on its stream or around its launch (all-to-all under NCCL, everything under RCCL). Under
gloo an operation is its annotation, which ends when the operation does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raybench.traces.events import Events, Kind, Message, different
from raybench.traces.intervals import Times
from raybench.traces.label import PREFIX, Label
from raybench.traces.names import (
    annotation_collective,
    element_bytes,
    kernel_collective,
    spoken_collective,
    wire_factor,
)

_VAGUE = ("p2p", "unknown")
_MADE_OF = {"all_gather": "all_to_all", "reduce_scatter": "all_to_all"}
"""What raybench sends on a CPU in place of gloo's own, which take longer."""


@dataclass(slots=True)
class Operation:
    """One operation of one rank; times as in the trace."""

    collective: str
    begin: int
    end: int
    payload_bytes: int | None
    """Of the whole tensor, see docs/metrics.md."""
    group: str
    """Empty where the trace does not tell."""
    group_size: int | None
    label: str
    """raybench's own, such as the name of the bucket."""
    calls: int = 1
    """More only where a source tells sums alone."""
    waiting_ns: int | None = None
    """Of it, before the last rank of the group had begun; None where not all ranks are there."""

    @property
    def duration_ns(self) -> int:
        return self.end - self.begin

    @property
    def wire_bytes(self) -> float | None:
        """Payload times the factor of the bus bandwidth."""
        if self.payload_bytes is None or self.group_size is None:
            return None
        factor = wire_factor(self.collective, self.group_size)
        return None if factor is None else self.payload_bytes * factor


class _Covering:
    """Finds the event of a set that covers an instant on a lane; events of one set and lane do not overlap."""

    def __init__(self, events: Events, rows: NDArray[np.intp]) -> None:
        self._by_lane: dict[int, tuple[Times, Times, NDArray[np.intp]]] = {}
        for lane in different(events.lane[rows]):
            own = rows[events.lane[rows] == lane]
            own = own[np.argsort(events.begin[own], kind="stable")]
            self._by_lane[lane] = events.begin[own], events.end[own], own

    def find(self, lane: int, at: int) -> int | None:
        if lane not in self._by_lane:
            return None
        begins, ends, rows = self._by_lane[lane]
        index = int(np.searchsorted(begins, at, side="right")) - 1
        return int(rows[index]) if index >= 0 and ends[index] >= at else None


def communication_kernels(events: Events) -> NDArray[np.intp]:
    """Rows of the kernels that communicate."""
    kernels = events.of(Kind.KERNEL)
    names = [i for i in events.names_of(kernels) if kernel_collective(events.names[i]) is not None]
    return events.of(Kind.KERNEL, named=names)


def find_operations(events: Events) -> list[Operation]:
    """Every operation, in order of its begin."""
    words = {i: said for i, name in enumerate(events.names) if (said := annotation_collective(name)) is not None}
    messages = {message.event: message for message in events.messages}
    spoken = events.of(Kind.CPU_OP, Kind.ANNOTATION, named=words)
    parameters = np.array(
        [m.event for m in events.messages if m.collective and events.kind[m.event] == Kind.CPU_OP], int
    )
    finder = _Finder(
        events,
        {i: said[0] for i, said in words.items()},
        messages,
        on_stream=_Covering(events, events.of(Kind.GPU_ANNOTATION, named=words)),
        on_host=_Covering(events, spoken),
        parameters=_Covering(events, parameters),
        labels=_Covering(events, _labels(events)),
    )
    kernels = communication_kernels(events)
    if events.of(Kind.KERNEL).size:
        found = finder.of_kernels(kernels)
    else:
        found = _take_labels(
            events, [finder.of_annotation(int(row)) for row in spoken if words[int(events.name[row])][1]]
        )
    return sorted(_joined(found), key=lambda operation: operation.begin)


def _take_labels(events: Events, found: list[tuple[int | None, Operation]]) -> list[tuple[int | None, Operation]]:
    """Give gloo's collectives, which its own threads run in the order of their launches, the labels of these launches.

    An operation with a label begins with its launch: what follows is its time, in the queue or under way.
    """
    rows = _labels(events)
    known = {label for label, _ in found}
    rows = rows[np.argsort(events.begin[rows], kind="stable")]
    free = [(row, Label.parse(events.names[events.name[row]])) for row in rows.tolist() if row not in known]
    taken: list[tuple[int | None, Operation]] = []
    for label, operation in sorted(found, key=lambda item: item[1].begin):
        place = None
        if label is None:
            place = next((i for i, (row, own) in enumerate(free) if _launches(events, row, own, operation)), None)
        if place is not None:
            label, own = free.pop(place)
            if own is not None:
                operation.collective = spoken_collective(own.kind) or operation.collective
                operation.group, operation.group_size, operation.label = own.group, own.group_size, own.label
                operation.payload_bytes = own.payload_bytes
        if label is not None:
            operation.begin = min(operation.begin, int(events.begin[label]))
        taken.append((label, operation))
    return taken


def _launches(events: Events, row: int, label: Label | None, operation: Operation) -> bool:
    if label is None or int(events.begin[row]) > operation.begin:
        return False
    collective = spoken_collective(label.kind) or ""
    return operation.collective in (collective, _MADE_OF.get(collective))


def _joined(found: list[tuple[int | None, Operation]]) -> list[Operation]:
    """What was launched under one of raybench's labels is one operation, such as all messages of an exchange."""
    by_label: dict[int, Operation] = {}
    joined = []
    for label, operation in found:
        if label is None:
            joined.append(operation)
        elif label in by_label:
            first = by_label[label]
            first.begin, first.end = min(first.begin, operation.begin), max(first.end, operation.end)
        else:
            by_label[label] = operation
    return [*joined, *by_label.values()]


def launches_without_times(events: Events) -> int:
    """Annotations that tell of a launch under NCCL; without GPU activities in the trace, all that is known of it."""
    if events.of(Kind.KERNEL).size:
        return 0
    said = {i: annotation_collective(name) for i, name in enumerate(events.names)}
    launching = [i for i, found in said.items() if found is not None and not found[1]]
    return int(events.of(Kind.CPU_OP, Kind.ANNOTATION, named=launching).size)


def _labels(events: Events) -> NDArray[np.intp]:
    ids = [i for i, name in enumerate(events.names) if name.startswith(PREFIX)]
    return events.of(Kind.ANNOTATION, named=ids)


class _Finder:
    def __init__(
        self,
        events: Events,
        words: dict[int, str],
        messages: dict[int, Message],
        *,
        on_stream: _Covering,
        on_host: _Covering,
        parameters: _Covering,
        labels: _Covering,
    ) -> None:
        self._events = events
        self._words = words
        self._messages = messages
        self._on_stream = on_stream
        self._on_host = on_host
        self._parameters = parameters
        self._labels = labels

    def of_kernels(self, kernels: NDArray[np.intp]) -> list[tuple[int | None, Operation]]:
        events = self._events
        wanted = set(events.correlation[kernels].tolist()) - {-1}
        launches = events.of(Kind.LAUNCH).tolist() if wanted else []
        launched = {c: row for row in launches if (c := int(events.correlation[row])) in wanted}
        return [self._of_kernel(row, launched.get(int(events.correlation[row]))) for row in kernels.tolist()]

    def _of_kernel(self, row: int, launch: int | None) -> tuple[int | None, Operation]:
        events = self._events
        said = [self._messages[row]] if row in self._messages else []
        word = None
        if (around := self._on_stream.find(int(events.lane[row]), int(events.begin[row]))) is not None:
            word = self._words[int(events.name[around])]
        collective = kernel_collective(events.names[events.name[row]]) or "unknown"
        host = self._covering(self._on_host, launch)
        if said and said[0].collective:
            collective = spoken_collective(said[0].collective) or collective
        elif collective in _VAGUE:
            collective = word or (self._words[int(events.name[host])] if host is not None else collective)
        said += self._parameters_around(launch) + ([self._messages[host]] if host in self._messages else [])
        return self._operation(row, collective, said, self._covering(self._labels, launch))

    def of_annotation(self, row: int) -> tuple[int | None, Operation]:
        said = self._parameters_around(row) + ([self._messages[row]] if row in self._messages else [])
        return self._operation(row, self._words[int(self._events.name[row])], said, self._covering(self._labels, row))

    def _parameters_around(self, row: int | None) -> list[Message]:
        found = self._covering(self._parameters, row)
        return [] if found is None else [self._messages[found]]

    def _covering(self, covering: _Covering, row: int | None) -> int | None:
        if row is None:
            return None
        return covering.find(int(self._events.lane[row]), int(self._events.begin[row]))

    def _operation(
        self, row: int, collective: str, said: list[Message], label: int | None
    ) -> tuple[int | None, Operation]:
        size = next((m.group_size for m in said if m.group_size > 0), None)
        payload = next((b for m in said if (b := _payload(collective, m, size)) is not None), None)
        group, text = next((m.group for m in said if m.group), ""), ""
        if label is not None and (own := Label.parse(self._events.names[self._events.name[label]])) is not None:
            collective = spoken_collective(own.kind) or collective
            group, size, payload, text = own.group, own.group_size, own.payload_bytes, own.label
        return label, Operation(
            collective=collective,
            begin=int(self._events.begin[row]),
            end=int(self._events.end[row]),
            payload_bytes=payload,
            group=group,
            group_size=size,
            label=text,
        )


def _payload(collective: str, message: Message, group_size: int | None) -> int | None:
    """Bytes of the whole tensor that an operation is about; None where the trace does not tell."""
    width = element_bytes(message.dtype)
    elements = message.in_elements
    if collective == "all_gather":
        elements = message.out_elements if message.out_elements >= 0 else elements * (group_size or -1)
    return None if width is None or elements < 0 else elements * width
