"""What the counted bytes are worth: the resident high-water of fresh processes, stage by stage."""

from __future__ import annotations

import gc
import itertools

import pytest

from raybench.data.batches import Batches
from raybench.suite.track import ModelConfig, Workload
from raybench.worker.build import build_strategy
from raybench.worker.memory import peak_rss_bytes, reset_peaks
from tests.gating import data_case, workload
from tests.live import LiveBytes
from tests.pool import Pool, Rank

STRATEGIES = ["bucketed", "zero1", "zero2", "zero3"]
LARGE = workload(
    ModelConfig(num_layers=12, width=256, num_heads=4, ffn_width=1024, vocabulary_size=512),
    sequence_length=32,
    micro_batch_size=1,
)
"""38 MB of parameters: large beside what a process allocates by the way."""


def train(rank: Rank, strategy: str, work: Workload) -> None:
    options = {"bucket_mib": 3.2} if strategy != "zero3" else {}
    case = data_case(strategy, rank.world_size, **options)
    built = build_strategy(work, case, rank.mesh(case.layout), rank.device)
    source = Batches(work, rank.world_size)
    for step in range(3):
        built.step(source.batch(step, rank.rank))
    built.settle()
    built.close()


def resident(rank: Rank, strategy: str) -> int:
    train(rank, strategy, workload())  # loads what is loaded once
    gc.collect()
    reset_peaks(rank.device)
    before = peak_rss_bytes()
    train(rank, strategy, LARGE)
    return peak_rss_bytes() - before


def counted(rank: Rank, strategy: str) -> int:
    with LiveBytes() as live:
        train(rank, strategy, LARGE)
    return live.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_resident_peaks_are_the_counted_ones_and_fall_from_stage_to_stage(pools, monkeypatch, size):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back at once
    rows = []
    for strategy in STRATEGIES:
        fresh = Pool(size)
        try:
            measured = fresh.run(resident, strategy)
        finally:
            fresh.close()
        rows.append((strategy, max(measured), max(pools(size).run(counted, strategy))))
        print(f"{size} ranks, {strategy}: {measured[0] / 1e6:.1f} MB resident, {rows[-1][2] / 1e6:.1f} MB counted")
    for strategy, found, expected in rows:
        assert found == pytest.approx(expected, rel=0.10), strategy
    for peaks in ([found for _, found, _ in rows], [expected for _, _, expected in rows]):
        assert all(more > less for more, less in itertools.pairwise(peaks))
