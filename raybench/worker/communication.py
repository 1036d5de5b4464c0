"""The one door through which ranks speak to each other: strategies call an `Axis`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raybench.doctor.marks import WAIT, among
from raybench.worker import exchange
from raybench.worker.buffers import Buffers
from raybench.worker.recorder import Operation, Recorder


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
        recorder.launched(operation)
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
        self.buffers = Buffers()

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
            arrived = self.buffers.take(tensor.numel() // self.size * (self.size - 1), tensor)
            begun = exchange.reduce_scatter(output, tensor, arrived, self._members, self.index, self.size)
            return Pending(begun, self.recorder, mark, operation, lambda: self.buffers.give(arrived))
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
