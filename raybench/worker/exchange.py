"""Reduce-scatter and all-gather made of sends and receives, for backends whose own ones move more than they have to.

Every rank sends each other rank that one's part, directly: (N-1)/N of the tensor, which is what a ring moves. gloo's
own reduce-scatter is an all-reduce, twice as much. Parts travel in chunks: one is summed while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 4 * 2**20
REDUCE_TAG, GATHER_TAG = 1, 2
"""Messages of one pair and tag arrive in the order in which they were sent."""


@dataclass
class Chunk:
    """Messages that belong together, and what is to be done once they are there."""

    works: Sequence[dist.Work]
    then: Callable[[], None] | None = None


class Exchange:
    """Sends and receives under way; complete after `wait`, which does what is left of the arithmetic."""

    def __init__(self, chunks: Sequence[Chunk], sends: Sequence[dist.Work]) -> None:
        self._chunks = chunks
        self._sends = sends

    def wait(self) -> None:
        for chunk in self._chunks:
            for work in chunk.works:
                work.wait()
            if chunk.then is not None:
                chunk.then()
        for work in self._sends:
            work.wait()
        self._chunks, self._sends = (), ()


@torch.no_grad()
def reduce_scatter(
    output: Tensor, tensor: Tensor, arrived: Tensor, group: dist.ProcessGroup, index: int, size: int
) -> Exchange:
    """Sum `tensor` over the group's ranks into each one's `output`: its own part first, then by rank.

    16-bit tensors are summed in fp32.

    Args:
        arrived: memory for what the other ranks send, a part of each.
    """
    parts = tensor.view(size, -1)
    total = output.view(-1)
    received = arrived.view(size - 1, -1)
    bounds = _bounds(parts.shape[1], tensor.element_size())
    peers = _peers(index, size)
    arriving = [
        [_receive(received[row, a:b], peer, group, REDUCE_TAG) for row, (peer, _) in enumerate(peers)]
        for a, b in pairwise(bounds)
    ]
    sends = [_send(parts[peer, a:b], peer, group, REDUCE_TAG) for a, b in pairwise(bounds) for _, peer in peers]
    rows = sorted(range(size - 1), key=lambda row: peers[row][0])

    def summing(a: int, b: int) -> Callable[[], None]:
        return lambda: _sum(total[a:b], parts[index, a:b], [received[row, a:b] for row in rows])

    chunks = [Chunk(works, summing(a, b)) for works, (a, b) in zip(arriving, pairwise(bounds), strict=True)]
    return Exchange(chunks, sends)


@torch.no_grad()
def sum_parts(output: Tensor, received: Tensor, size: int) -> None:
    """The sum of `size` equal parts of `received` into `output`; 16-bit tensors are summed in fp32."""
    first, *others = received.view(size, -1).unbind()
    _sum(output.view(-1), first, others)


@torch.no_grad()
def all_gather(output: Tensor, tensor: Tensor, group: dist.ProcessGroup, index: int, size: int) -> Exchange:
    """Every rank's `tensor`, which may be its own part of `output`, in its place of `output`; arguments as `Axis`'s."""
    parts = output.view(size, -1)
    own = tensor.view(-1)
    peers = _peers(index, size)
    arriving = [_receive(parts[peer], peer, group, GATHER_TAG) for peer, _ in peers]
    sends = [_send(own, peer, group, GATHER_TAG) for _, peer in peers]
    if own.data_ptr() != parts[index].data_ptr():
        parts[index].copy_(own)
    return Exchange([Chunk(arriving)], sends)


def _peers(index: int, size: int) -> list[tuple[int, int]]:
    """Whom to receive from and whom to send to, one pair after the other, so that no rank is everybody's first."""
    return [((index - step) % size, (index + step) % size) for step in range(1, size)]


def _bounds(length: int, element_size: int) -> list[int]:
    """Where chunks of `length` elements begin and end."""
    return [*range(0, length, max(1, CHUNK_BYTES // element_size)), length]


def _send(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    work = dist.isend(tensor, group=group, group_dst=peer, tag=tag)
    assert work is not None  # this rank is one of the group
    return work


def _receive(tensor: Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    work = dist.irecv(tensor, group=group, group_src=peer, tag=tag)
    assert work is not None
    return work


@torch.no_grad()
def _sum(output: Tensor, own: Tensor, others: Sequence[Tensor]) -> None:
    """`own` plus `others` into `output`, which may be `own` itself."""
    if own.dtype in (torch.float16, torch.bfloat16):
        total = own.float()
        for other in others:
            total += other
        output.copy_(total)
        return
    torch.add(own, others[0], out=output)
    for other in others[1:]:
        output += other
