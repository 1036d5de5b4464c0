"""Point-to-point transfers: one direction between two ranks, in order, begun early and waited for late."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from raybench.doctor.marks import TRANSFERS, WAIT, among
from raybench.worker.clock import ClockOffset
from raybench.worker.communication import Axis
from raybench.worker.recorder import Operation, Recorder

SEND, RECEIVE = TRANSFERS


class Channel:
    """From one rank of a pipeline to another: what is sent n-th is received n-th.

    The other direction is a channel of its own, with its own communicator: NCCL runs the transfers of one in order, and
    an early receive would hold back a later send.
    """

    size = 2

    def __init__(
        self, name: str, ranks: tuple[int, int], rank: int, group: dist.ProcessGroup | None, recorder: Recorder
    ) -> None:
        """`ranks` are the sender and the receiver, of which `rank` is one."""
        self.name = name
        self.ranks = ranks
        self.where = f"{name} {among(ranks, is_transfer=True)}"
        self._peer = ranks[1 - ranks.index(rank)]
        self._group = group
        self._recorder = recorder

    def send(self, tensor: Tensor, *, label: str) -> Transfer:
        """Begin to send `tensor`, which must not change until `wait` has returned."""
        dense = tensor.contiguous()
        mark, operation = self._recorder.begin(SEND, label, self, dense)
        work = dist.isend(dense, self._peer, group=self._group)
        return Transfer(work, dense, self._recorder, mark, operation)

    def receive(self, buffer: Tensor, *, label: str) -> Transfer:
        """Begin to receive into `buffer`, contiguous, which is whole once `wait` has returned."""
        mark, operation = self._recorder.begin(RECEIVE, label, self, buffer)
        work = dist.irecv(buffer, self._peer, group=self._group)
        return Transfer(work, buffer, self._recorder, mark, operation)


class Transfer:
    """A send or receive under way; it keeps its tensor until it is waited for."""

    def __init__(
        self, work: dist.Work | None, tensor: Tensor, recorder: Recorder, mark: str, operation: Operation | None
    ) -> None:
        assert work is not None, "this rank is not a member of the channel's group"
        self._work = work
        self._tensor: Tensor | None = tensor
        self._recorder = recorder
        self._mark = mark
        self._operation = operation
        self._begun = recorder.event() if operation is not None else None
        recorder.launched(operation)

    def wait(self, why: str = "") -> Tensor:
        """The tensor, once it has arrived: on a GPU for what follows on the compute stream, else for the host.

        `why` is noted behind what is waited for, such as `, to compute 1F0`.
        A recorded operation ends here. Where `exposed_ns` is nearly zero it had ended before, unseen.
        """
        assert self._tensor is not None, f"{self._mark} is waited for twice"
        tensor, self._tensor = self._tensor, None
        self._recorder.marks.mark(f"{WAIT}{self._mark}{why}")
        operation = self._operation
        if operation is None:
            self._work.wait()
            return tensor
        before, before_ns = self._recorder.event(), time.time_ns()
        self._work.wait()
        after, operation.end_ns = self._recorder.event(), time.time_ns()
        operation.exposed_ns = operation.end_ns - before_ns
        if before is not None:
            self._recorder.time_by_events(operation, self._begun, before, after)
        return tensor


def waits_for_peer(operations: Sequence[Operation], axis: Axis, offset: ClockOffset) -> dict[int, int]:
    """Of each send and receive, how long the other end had not begun yet; by sequence number.

    All ranks of `axis` call together. The two ends of a transfer carry the same label.
    """
    own = [o for o in operations if o.axis == axis.name and o.kind in (SEND, RECEIVE)]
    begins: dict[tuple[int, str, str], int] = {}
    told = [(o.step, o.label, o.kind, o.begin_ns + offset.offset_ns) for o in own]
    for theirs in axis.gather_objects(told):
        begins.update({(step, label, kind): begin for step, label, kind, begin in theirs})
    waits: dict[int, int] = {}
    for operation in own:
        other = RECEIVE if operation.kind == SEND else SEND
        begin = begins.get((operation.step, operation.label, other))
        if begin is not None:
            waits[operation.sequence] = max(0, min(begin - offset.offset_ns, operation.end_ns) - operation.begin_ns)
    return waits
