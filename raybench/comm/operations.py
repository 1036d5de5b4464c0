"""The operations, one table: each fills in its buffers, its launch and what must come of it; all else is generic.

After NVIDIA's nccl-tests (https://github.com/NVIDIA/nccl-tests), where every collective fills such a table too. The
payload S of an operation is that of nccl-tests: the whole tensor, gathered or to be scattered where it has parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raybench.worker.communication import Axis

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PERIOD = 251
"""Of the values: prime, so that no part of a tensor begins like another."""
EXACT = 256
"""Whole numbers up to here are exact in bf16, and so are sums of values that stay below, in any order."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the older name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Buffers:
    """Of one rank: one-dimensional, on its device, of one type. In place, both are one tensor."""

    sent: Tensor
    received: Tensor


Launch = Callable[[Axis, Buffers, int, bool], dist.Work | None]
"""Begin an operation over the ranks of an axis; the number counts repeats. Complete at its return (on a GPU: for what
follows on the stream) unless the last argument asks for its `Work`."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One row of the table. Lengths are numbers of elements, of a payload of `length` among `size` ranks."""

    launch: Launch
    expected: Callable[[Axis, int, Tensor], Tensor]
    """What `received`, the last argument, must hold after the first repeat."""
    sent_length: Callable[[int, int], int] = lambda length, size: length
    received_length: Callable[[int, int], int] = lambda length, size: length
    in_place: bool = False
    has_parts: bool = False
    """Whether the payload is cut into a part a rank: its length is a multiple of their number."""
    hops: Callable[[int], int] = lambda size: 1
    """How many operations, one after the other, one launch is."""
    can_overlap: bool = True
    """Whether a launch returns with its work under way."""

    def length(self, payload_bytes: int, dtype: torch.dtype, size: int) -> int:
        """Elements of the largest possible payload of at most so many bytes; at least one for each part."""
        unit = size if self.has_parts else 1
        return max(1, payload_bytes // dtype.itemsize // unit) * unit

    def buffers(self, axis: Axis, length: int, dtype: torch.dtype, device: torch.device) -> Buffers:
        sent = torch.zeros(self.sent_length(length, axis.size), dtype=dtype, device=device)
        if self.in_place:
            return Buffers(sent, sent)
        return Buffers(sent, torch.zeros(self.received_length(length, axis.size), dtype=dtype, device=device))

    def fill(self, axis: Axis, buffers: Buffers) -> None:
        """Give `sent` this rank's values, and `received` none that could be right."""
        buffers.received.fill_(-1)
        buffers.sent.copy_(values(axis.index, len(buffers.sent), buffers.sent, axis.size))

    def num_wrong(self, axis: Axis, buffers: Buffers, length: int) -> int:
        """Elements of `received` that are not what they must be."""
        got = buffers.received
        want = self.expected(axis, length, got)
        if axis.size <= EXACT:
            return int((got != want).sum())
        return int(((got.float() - want.float()).abs() > torch.finfo(got.dtype).eps * axis.size).sum())


def values(place: int, length: int, like: Tensor, size: int) -> Tensor:
    """What the rank at a place of a group of `size` sends: small whole numbers, different on every rank.

    Of the type, and on the device, of `like`.
    """
    highest = max(1, min(3, EXACT // size))
    generator = torch.Generator().manual_seed(place)
    period = torch.randint(0, highest + 1, (PERIOD,), generator=generator)
    return _repeated(period, length, like)


def _repeated(period: Tensor, length: int, like: Tensor) -> Tensor:
    return period.to(like.device, like.dtype).repeat(-(-length // PERIOD))[:length]


def _sum(axis: Axis, length: int, like: Tensor) -> Tensor:
    in_float = torch.empty(0)
    periods = [values(place, PERIOD, in_float, axis.size) for place in range(axis.size)]
    return _repeated(torch.stack(periods).sum(0), length, like)


def _part(whole: Tensor, axis: Axis) -> Tensor:
    return whole.view(axis.size, -1)[axis.index]


def _gathered(axis: Axis, length: int, like: Tensor) -> Tensor:
    part = length // axis.size
    return torch.cat([values(place, part, like, axis.size) for place in range(axis.size)])


def _exchanged(axis: Axis, length: int, like: Tensor) -> Tensor:
    return torch.cat([_part(values(place, length, like, axis.size), axis) for place in range(axis.size)])


def _launch_broadcast(axis: Axis, buffers: Buffers, repeat: int, is_async: bool) -> dist.Work | None:
    """Each repeat from another rank, which has what it sends from the repeat before: no rank can run ahead."""
    source = axis.ranks[repeat % axis.size]
    work: dist.Work | None = dist.broadcast(buffers.sent, src=source, group=axis.group, async_op=is_async)
    return work


def _launch_round(axis: Axis, buffers: Buffers, repeat: int, is_async: bool) -> None:
    """One message goes round all ranks, one after the other; with two of them it goes there and back."""
    peer_after, peer_before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    if axis.index == 0:
        dist.send(buffers.sent, peer_after, group=axis.group)
        dist.recv(buffers.received, peer_before, group=axis.group)
    else:
        dist.recv(buffers.received, peer_before, group=axis.group)
        dist.send(buffers.received, peer_after, group=axis.group)


def _launch_shift(axis: Axis, buffers: Buffers, repeat: int, is_async: bool) -> None:
    """Every rank sends to the next and receives from the one before at once; with two of them, both ways."""
    peer_after, peer_before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    both = [
        dist.P2POp(dist.isend, buffers.sent, peer_after, group=axis.group),
        dist.P2POp(dist.irecv, buffers.received, peer_before, group=axis.group),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        in_place=True,
        launch=lambda axis, b, _, is_async: dist.all_reduce(b.sent, group=axis.group, async_op=is_async),
        expected=_sum,
    ),
    "reduce_scatter": Operation(
        has_parts=True,
        received_length=lambda length, size: length // size,
        launch=lambda axis, b, _, is_async: _reduce_scatter(b.received, b.sent, group=axis.group, async_op=is_async),
        expected=lambda axis, length, like: _part(_sum(axis, length, like), axis),
    ),
    "all_gather": Operation(
        has_parts=True,
        sent_length=lambda length, size: length // size,
        launch=lambda axis, b, _, is_async: _all_gather(b.received, b.sent, group=axis.group, async_op=is_async),
        expected=_gathered,
    ),
    "all_to_all": Operation(
        has_parts=True,
        launch=lambda axis, b, _, is_async: dist.all_to_all_single(
            b.received, b.sent, group=axis.group, async_op=is_async
        ),
        expected=_exchanged,
    ),
    "broadcast": Operation(
        in_place=True,
        launch=_launch_broadcast,
        expected=lambda axis, length, like: values(0, length, like, axis.size),
    ),
    "send": Operation(
        launch=_launch_round,
        expected=lambda axis, length, like: values(0, length, like, axis.size),
        hops=lambda size: size,
        can_overlap=False,
    ),
    "send_receive": Operation(
        launch=_launch_shift,
        expected=lambda axis, length, like: values((axis.index - 1) % axis.size, length, like, axis.size),
        can_overlap=False,
    ),
}
