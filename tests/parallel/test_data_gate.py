"""Every data-parallel strategy computes what one process computes."""

from __future__ import annotations

import pytest

from raybench.suite.track import ModelConfig, Workload
from raybench.worker.gate import GateResult
from tests.gating import TINY, data_case, gate, ragged, workload
from tests.pool import Rank

STRATEGIES = ["naive", "accumulated", "hooked", "overlapped", "bucketed", "torch-ddp"]
SMALL_BUCKETS = {"bucket_mib": 0.002}

WORKLOADS = {
    "plain": workload(),
    "accumulation": workload(num_micro_batches=3),
    "clipping": workload(num_micro_batches=2, clip_gradient_norm=0.1),
    "tied head": workload(TINY.model_copy(update={"tied_head": True}), num_micro_batches=2),
    "recomputation": workload(recompute="full"),
    "ragged": workload(num_micro_batches=3, data=ragged()),
    "sgd": workload(optimizer={"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.1}),
    "schedule": workload(optimizer={"schedule": "cosine", "warmup_steps": 2, "schedule_steps": 5}),
    "frozen": workload("Frozen", num_micro_batches=2),
    "buffers": workload("Buffers", num_micro_batches=2),
}


def run_gate(rank: Rank, strategy: str, size: int, work: Workload) -> GateResult | None:
    options = SMALL_BUCKETS if strategy in ("bucketed", "torch-ddp") else {}
    return gate(rank, work, data_case(strategy, size, **options))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_at_every_size_and_accumulation(pools, strategy, size, num_micro_batches):
    results = pools(4).run(run_gate, strategy, size, workload(num_micro_batches=num_micro_batches))
    for result in results[:size]:
        assert result.passed, result.reason
        assert result == results[0]
        assert result.worst_error < 1e-5
    assert results[size:] == [None] * (4 - size)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_passes_every_workload(pools, strategy, name):
    results = pools(2).run(run_gate, strategy, 2, WORKLOADS[name])
    assert results[0].passed, results[0].reason


@pytest.mark.parametrize("seed", range(10))
def test_correct_code_passes_whatever_the_seed(pools, seed):
    results = pools(2).run(run_gate, "bucketed", 2, workload(num_micro_batches=2, clip_gradient_norm=1.0, seed=seed))
    assert results[0].passed, results[0].reason


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "torch-ddp"])
@pytest.mark.parametrize("model", ["Branches", "TurnByTurn"])
def test_parameters_that_only_some_ranks_use_are_reduced(pools, strategy, model):
    """Unused on some ranks, or in some micro-batches; torch's reducer would wait for ever on ranks."""
    results = pools(2).run(run_gate, strategy, 2, workload(model, num_micro_batches=2))
    assert results[0].passed, results[0].reason


def test_key_bias_of_a_larger_model_is_null_not_wrong(pools):
    model = ModelConfig(num_layers=1, width=32, num_heads=4, ffn_width=64, vocabulary_size=101)
    results = pools(2).run(run_gate, "bucketed", 2, workload(model, micro_batch_size=4))
    assert results[0].passed, results[0].reason
