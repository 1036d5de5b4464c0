"""The record of what ranks say to each other: every operation is marked, and on request recorded.

Recording is switched on for a few instrumented steps outside the timed window; at all other times an operation costs
its mark alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from raybench.doctor.marks import text_of
from raybench.traces.label import Label
from raybench.worker.spans import Spans

WIRE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "send": lambda _: 1,
    "receive": lambda _: 0,
}
"""Bytes that a rank sends in each operation, as a multiple of its payload: the mean over the ranks of a ring."""


class Among(Protocol):
    """Whom an operation is among: an axis, or the two ends of a channel."""

    name: str
    where: str
    """Its name and ranks, as marks tell them."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...


class Marks(Protocol):
    """Where a rank marks its last operation."""

    def mark(self, text: str) -> None: ...


class Annotations(Protocol):
    """Who names what is launched in a trace."""

    def launch(self, label: Label) -> None: ...
    def launched(self) -> None: ...


@dataclass
class Operation:
    """One recorded operation of one rank; times in nanoseconds of the host clock."""

    sequence: int
    step: int
    kind: str
    label: str
    axis: str
    group_size: int
    payload_bytes: int
    wire_bytes: int
    begin_ns: int
    end_ns: int = 0
    exposed_ns: int = 0
    launch_ns: int = 0
    """How long beginning it took of the rank's own time."""


class Recorder:
    """Keeps the operations of the instrumented steps, and marks every operation at all times."""

    def __init__(self, marks: Marks, device: torch.device) -> None:
        self.marks = marks
        self.device = device
        self.operations: list[Operation] = []
        self.spans = Spans(device)
        self.step: int | None = None
        self.num_begun = 0
        """Operations begun so far, recorded or not."""
        self.annotations: Annotations | None = None
        """Named ranges around launches, while a trace is recorded."""
        self._counts: dict[str, int] = {}
        """Operations begun so far among each set of ranks."""
        self._events: list[tuple[Operation, Any, Any, Any]] = []
        self._origin: tuple[int, Any] = (0, None)

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record every operation inside; on a GPU the times come from events of the compute stream."""
        self.step = step
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            origin = torch.cuda.Event(enable_timing=True)
            origin.record()
            self._origin = (time.time_ns(), origin)
        try:
            with self.spans.recording(step):
                yield
        finally:
            self.step = None
            self._resolve_events()

    def mark(self, kind: str, label: str, axis: Among) -> str:
        """Note that an operation begins; returns what was noted."""
        number = self._counts[axis.where] = self._counts.get(axis.where, 0) + 1
        text = text_of(kind, label, axis.where, number)
        self.marks.mark(text)
        return text

    def begin(self, kind: str, label: str, axis: Among, tensor: Tensor) -> tuple[str, Operation | None]:
        """Note that an operation begins, and record it in an instrumented step; returns the mark and the record."""
        text = self.mark(kind, label, axis)
        self.num_begun += 1
        if self.step is None:
            return text, None
        payload = tensor.numel() * tensor.element_size()
        if self.annotations is not None:
            self.annotations.launch(Label.of(kind, axis.name, axis.ranks, payload, label))
        wire = int(payload * WIRE_FACTOR[kind](axis.size))
        operation = Operation(
            len(self.operations), self.step, kind, label, axis.name, axis.size, payload, wire, time.time_ns()
        )
        self.operations.append(operation)
        return text, operation

    def launched(self, operation: Operation | None) -> None:
        """What began last is launched."""
        if operation is not None:
            operation.launch_ns = time.time_ns() - operation.begin_ns
        if self.annotations is not None:
            self.annotations.launched()

    def event(self) -> Any:
        """A recorded event of the compute stream, or None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time_by_events(self, operation: Operation, begun: Any, before_wait: Any, after_wait: Any) -> None:
        self._events.append((operation, begun, before_wait, after_wait))

    def _resolve_events(self) -> None:
        if not self._events:
            return
        torch.cuda.synchronize(self.device)
        origin_ns, origin = self._origin
        for operation, begun, before_wait, after_wait in self._events:
            operation.begin_ns = origin_ns + int(origin.elapsed_time(begun) * 1e6)
            operation.end_ns = origin_ns + int(origin.elapsed_time(after_wait) * 1e6)
            operation.exposed_ns = int(before_wait.elapsed_time(after_wait) * 1e6)
        self._events.clear()
