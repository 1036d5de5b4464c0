"""The one door through which ranks speak to each other: it marks, and on request records, every operation.

Strategies call an `Axis`. Recording is switched on for a few instrumented steps outside the timed window; at all other
times an operation costs its mark alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raybench.doctor.marks import WAIT, among, text_of
from raybench.traces.label import Label
from raybench.worker import exchange
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

    def launched(self) -> None:
        """What began last is launched."""
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


class Pending:
    """An operation under way. `wait` returns once its result may be used by what follows on this rank."""

    def __init__(
        self,
        work: dist.Work | exchange.Exchange | None,
        recorder: Recorder,
        mark: str,
        operation: Operation | None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """`mark` is what was noted of its beginning."""
        self._work = work
        self._recorder = recorder
        self._mark = mark
        self.operation = operation
        self._finish = finish
        self._begun = recorder.event() if operation is not None else None
        recorder.launched()
        if operation is not None and isinstance(work, dist.Work) and self._begun is None:
            work.get_future().add_done_callback(self._note_end)

    def future(self, value: Tensor) -> torch.futures.Future[Tensor]:
        """A future of `value`, for libraries that wait themselves."""
        if not isinstance(self._work, dist.Work):
            self.wait()
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(value)
            return done
        return self._work.get_future().then(lambda _: value)

    def wait(self) -> None:
        if self._work is None:
            self._end()
            return
        self._recorder.marks.mark(WAIT + self._mark)
        operation = self.operation
        if operation is None:
            self._work.wait()
        else:
            before, before_ns = self._recorder.event(), time.time_ns()
            self._work.wait()
            after, after_ns = self._recorder.event(), time.time_ns()
            operation.end_ns = operation.end_ns or after_ns
            operation.exposed_ns = after_ns - before_ns
            if before is not None:
                self._recorder.time_by_events(operation, self._begun, before, after)
        self._work = None
        self._end()

    def _end(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _note_end(self, _: object) -> None:
        if self.operation is not None and not self.operation.end_ns:
            self.operation.end_ns = time.time_ns()


class Axis:
    """The ranks among which one kind of parallelism communicates, seen from one of them."""

    def __init__(
        self, name: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None, recorder: Recorder
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        """Global ranks in order along the axis."""
        self.where = f"{name} {among(self.ranks)}"
        self.index = self.ranks.index(rank)
        """This rank's place along the axis."""
        self.group = group
        self.recorder = recorder

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, *, label: str) -> Pending:
        """Sum `tensor` over the axis, in place; begun at once, complete after `wait`."""
        mark, operation = self.recorder.begin("all_reduce", label, self, tensor)
        return self._start(lambda t: dist.all_reduce(t, group=self.group, async_op=True), tensor, mark, operation)

    def broadcast(self, tensor: Tensor, *, label: str, place: int = 0) -> Pending:
        """Give the `tensor` of the rank at `place` along the axis to all of its ranks, in place."""
        mark, operation = self.recorder.begin("broadcast", label, self, tensor)
        source = self.ranks[place]
        return self._start(
            lambda t: dist.broadcast(t, src=source, group=self.group, async_op=True), tensor, mark, operation
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, *, label: str, in_order: bool = False) -> Pending:
        """Sum `tensor` over the axis and leave this rank's part of the sum in `output`.

        Args:
            output: contiguous; the part at this rank's place of the first dimension cut into equal parts. It may be
                that part of `tensor` itself.
            tensor: contiguous, `size` times as long; its content is lost.
            in_order: all ranks surely begin the axis' operations in one order, so that a backend's collective may do.
        """
        mark, operation = self.recorder.begin("reduce_scatter", label, self, tensor)
        if self.size == 1:
            return Pending(None, self.recorder, mark, None, lambda: _copy(output, tensor))
        if self._exchanges(tensor, in_order):
            begun = exchange.reduce_scatter(output, tensor, self._members, self.index, self.size)
            return Pending(begun, self.recorder, mark, operation)
        if tensor.device.type == "cpu":
            return self._sum_of_all_to_all(output, tensor, mark, operation)
        work = dist.reduce_scatter_tensor(output, tensor, group=self.group, async_op=True)
        return Pending(work, self.recorder, mark, operation)

    def all_gather(self, output: Tensor, tensor: Tensor, *, label: str, in_order: bool = False) -> Pending:
        """Put every rank's `tensor` into `output`, one after the other along the first dimension; both contiguous.

        `tensor` may be this rank's part of `output` itself; `in_order` as in `reduce_scatter`.
        """
        mark, operation = self.recorder.begin("all_gather", label, self, output)
        if self.size == 1:
            return Pending(None, self.recorder, mark, None, lambda: _copy(output, tensor))
        if self._exchanges(output, in_order):
            begun = exchange.all_gather(output, tensor, self._members, self.index, self.size)
            return Pending(begun, self.recorder, mark, operation)
        if tensor.device.type == "cpu":  # the same bytes as gloo's own all-gather, in about half of its time
            sent = tensor.flatten().repeat(self.size)
            work = dist.all_to_all_single(output.view(-1), sent, group=self.group, async_op=True)
            return Pending(work, self.recorder, mark, operation)
        work = dist.all_gather_into_tensor(output, tensor, group=self.group, async_op=True)
        return Pending(work, self.recorder, mark, operation)

    def gather_objects(self, value: object) -> list[Any]:
        """Every rank's `value`, in order along the axis; for results and checks, never inside a timed window."""
        if self.size == 1:
            return [value]
        self.recorder.mark("gather", "objects", self)
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self, label: str) -> None:
        """Wait for all ranks of the axis."""
        if self.size > 1:
            self.recorder.mark("barrier", label, self)
            dist.barrier(group=self.group)

    def _exchanges(self, whole: Tensor, in_order: bool) -> bool:
        """Whether parts are sent and received one by one: gloo's own collectives move more, or take longer.

        Tensors of one chunk are quicker in one collective.
        """
        is_small = whole.numel() * whole.element_size() <= exchange.CHUNK_BYTES
        return whole.device.type == "cpu" and not (in_order and is_small)

    def _sum_of_all_to_all(self, output: Tensor, tensor: Tensor, mark: str, operation: Operation | None) -> Pending:
        """A reduce-scatter that moves no more than it has to: every rank gets the summands of its part."""
        received = torch.empty_like(tensor)
        work = dist.all_to_all_single(received, tensor, group=self.group, async_op=True)
        return Pending(work, self.recorder, mark, operation, lambda: exchange.sum_parts(output, received, self.size))

    @property
    def _members(self) -> dist.ProcessGroup:
        assert self.group is not None  # more than one rank
        return self.group

    def _start(
        self,
        launch: Callable[[Tensor], dist.Work | None],
        tensor: Tensor,
        mark: str,
        operation: Operation | None,
    ) -> Pending:
        if self.size == 1:
            return Pending(None, self.recorder, mark, None)
        if tensor.is_contiguous():
            return Pending(launch(tensor), self.recorder, mark, operation)
        dense = tensor.contiguous()
        return Pending(launch(dense), self.recorder, mark, operation, lambda: _copy(tensor, dense))


@torch.no_grad()
def _copy(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)
