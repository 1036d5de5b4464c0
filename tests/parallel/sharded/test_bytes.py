"""What each stage promises: bytes held, bytes sent, and the highest sum of both while a step runs."""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise

import pytest

from raybench.data.batches import Batches
from raybench.parallel.strategy import Strategy
from raybench.suite.track import ModelConfig
from raybench.worker.build import build_strategy
from raybench.worker.memory import ActivationMeter
from tests.gating import data_case, workload
from tests.live import LiveBytes
from tests.pool import Rank
from tests.traffic import tcp_bytes

STRATEGIES = ["bucketed", "zero1", "zero2", "zero3"]
DEEP = workload(
    ModelConfig(num_layers=24, width=64, num_heads=2, ffn_width=192, vocabulary_size=61),
    sequence_length=8,
    micro_batch_size=1,
)
"""Many small blocks, so that states outweigh activations and two blocks."""


def build(rank: Rank, strategy: str) -> Strategy:
    options = {"bucket_mib": 0.25} if strategy != "zero3" else {}
    case = data_case(strategy, rank.world_size, **options)
    return build_strategy(DEEP, case, rank.mesh(case.layout), rank.device)


def held(rank: Rank, strategy: str) -> tuple[int, tuple[int, ...]]:
    built = build(rank, strategy)
    source = Batches(DEEP, rank.world_size)
    for step in range(2):
        built.step(source.batch(step, rank.rank))
    counted = astuple(built.state_bytes())
    num_parameters = sum(p.numel() for _, p in built.full_parameters())
    built.close()
    return num_parameters, counted


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_are_divided_as_promised(pools, strategy, size):
    """Parameters, gradients and the two moments of AdamW: 4, 4 and 8 bytes of each parameter, whole or in parts."""
    stage = STRATEGIES.index(strategy)
    for num_parameters, counted in pools(size).run(held, strategy):
        expected = [
            4 * num_parameters / (size if stage >= 3 else 1),
            4 * num_parameters / (size if stage >= 2 else 1),
            8 * num_parameters / (size if stage >= 1 else 1),
        ]
        assert counted == pytest.approx(expected, rel=0.01)


def sent(rank: Rank, strategy: str) -> tuple[int, int, int]:
    """Bytes of all parameters, of embedding and head, and what this rank's connections sent in one step."""
    built = build(rank, strategy)
    source = Batches(DEEP, rank.world_size)
    built.step(source.batch(0, rank.rank))
    built.settle()
    batch = source.batch(1, rank.rank)
    rank.mesh(built.context.mesh.layout).data.barrier("before")
    before = tcp_bytes()[0]
    built.step(batch)
    built.settle()
    rank.mesh(built.context.mesh.layout).data.barrier("after")
    num_bytes = tcp_bytes()[0] - before
    sizes = {name: 4 * p.numel() for name, p in built.full_parameters()}
    built.close()
    return (
        sum(sizes.values()),
        sum(n for name, n in sizes.items() if name.startswith(("embedding.", "head."))),
        num_bytes,
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("strategy", "factor"), [("bucketed", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_bytes_on_the_interface_are_those_of_the_paper(pools, strategy, factor, size):
    """2, 2, 2 and 3 times the parameters, by (N-1)/N; of embedding and head 2 times, as backward gathers neither."""
    for whole, ends, num_bytes in pools(size).run(sent, strategy):
        assert num_bytes == pytest.approx(factor * whole * (size - 1) / size, rel=0.05)
        if strategy == "zero3":
            assert num_bytes == pytest.approx((factor * whole - ends) * (size - 1) / size, rel=0.03)


def peak(rank: Rank, strategy: str) -> dict[str, int]:
    with LiveBytes() as live:
        built = build(rank, strategy)
        source = Batches(DEEP, rank.world_size)
        for step in range(2):
            built.step(source.batch(step, rank.rank))
        live.begin_again()
        built.step(source.batch(2, rank.rank))
        built.settle()
    with ActivationMeter(list(built.held_parameters())) as meter:
        built.step(source.batch(3, rank.rank))
    sizes = {name: 4 * p.numel() for name, p in built.full_parameters()}
    built.close()
    return {
        "peak": live.peak_bytes,
        "states": 4 * sum(sizes.values()),
        "block": sum(n for name, n in sizes.items() if name.startswith("blocks.3.")),
        "activations": meter.peak_bytes,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_peaks_fall_from_stage_to_stage_to_a_part_and_two_blocks(pools, size):
    found = {strategy: pools(size).run(peak, strategy) for strategy in STRATEGIES}
    peaks = [max(rank["peak"] for rank in ranks) for ranks in found.values()]
    assert all(more > less for more, less in pairwise(peaks))
    for rank in found["zero3"]:
        allowed = rank["states"] / size + 2 * rank["block"] + rank["activations"]
        assert rank["states"] / size < rank["peak"] <= 1.15 * allowed
