"""Reduce-scatter and all-gather made of sends and receives: right values, and no byte more than a ring moves."""

from __future__ import annotations

import pytest
import torch

from raybench.suite.track import Layout
from raybench.worker import exchange
from tests.pool import Rank
from tests.traffic import tcp_bytes


def values(rank: Rank, length: int, dtype: torch.dtype, in_place: bool, in_order: bool = False) -> tuple[bool, bool]:
    """Whether a reduce-scatter and an all-gather of parts of `length` are right; three of each under way at once."""
    axis = rank.mesh(Layout(data=rank.world_size)).data
    size = axis.size

    def held(place: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + place)
        return torch.randint(-64, 64, (size * length,), generator=generator).to(dtype)

    summed, gathered, pending = [], [], []
    for number in range(3):
        whole = held(axis.index, number)
        own = whole[axis.index * length : (axis.index + 1) * length]
        output = own if in_place else torch.empty(length, dtype=dtype)
        pending.append(axis.reduce_scatter(output, whole, label="sum", in_order=in_order))
        summed.append(output)
        target = torch.full((size * length,), -7, dtype=dtype)
        part = target[axis.index * length : (axis.index + 1) * length] if in_place else torch.empty(length, dtype=dtype)
        part.copy_(torch.arange(length) % 50 + 50 * axis.index + number)
        pending.append(axis.all_gather(target, part, label="gather", in_order=in_order))
        gathered.append(target)
    for one in pending:
        one.wait()
    sums_right = all(
        torch.equal(
            output,
            torch.stack([held(place, number).chunk(size)[axis.index].float() for place in range(size)])
            .sum(0)
            .to(dtype),
        )
        for number, output in enumerate(summed)
    )
    parts_right = all(
        torch.equal(
            target, torch.cat([(torch.arange(length) % 50 + 50 * place + number).to(dtype) for place in range(size)])
        )
        for number, target in enumerate(gathered)
    )
    return sums_right, parts_right


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 1000])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_rank_gets_its_part_of_the_sum_and_all_parts(pools, size, length, in_place, dtype, in_order):
    assert pools(size).run(values, length, dtype, in_place, in_order) == [(True, True)] * size


def chunked(rank: Rank) -> tuple[bool, bool]:
    exchange.CHUNK_BYTES = 64  # pieces of 16 elements
    try:
        return values(rank, 1000, torch.float32, False)
    finally:
        exchange.CHUNK_BYTES = 4 * 2**20


def test_chunks_are_put_together_in_order(pools):
    assert pools(3).run(chunked) == [(True, True)] * 3


def low_precision(rank: Rank) -> float:
    axis = rank.mesh(Layout(data=rank.world_size)).data
    output = torch.empty(1, dtype=torch.bfloat16)
    first = 256.0 if axis.index == 0 else 0.5
    axis.reduce_scatter(output, torch.full((axis.size,), first, dtype=torch.bfloat16), label="small").wait()
    return float(output)


def test_small_addends_survive_a_large_one_in_bf16(pools):
    """256 + 0.5 is 256 in bf16; summed in fp32, four ranks give 257.5, which rounds to 258."""
    assert pools(4).run(low_precision) == [258.0] * 4


def traffic(rank: Rank, kind: str, num_elements: int) -> int:
    axis = rank.mesh(Layout(data=rank.world_size)).data
    whole, part = torch.zeros(num_elements), torch.zeros(num_elements // axis.size)
    axis.barrier("before")
    before, _ = tcp_bytes()
    if kind == "reduce_scatter":
        axis.reduce_scatter(part, whole, label="sum").wait()
    else:
        axis.all_gather(whole, part, label="gather").wait()
    axis.barrier("after")
    return tcp_bytes()[0] - before


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_bytes_on_the_interface_are_a_rings(pools, kind, size):
    num_elements = 3 * 4 * 2**18
    for sent in pools(size).run(traffic, kind, num_elements):
        assert sent == pytest.approx(4 * num_elements * (size - 1) / size, rel=0.01)
