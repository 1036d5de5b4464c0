"""Every sharded strategy computes what one process computes."""

from __future__ import annotations

import pytest

from raybench.suite.track import Case, Layout, Workload
from raybench.worker.gate import GateResult
from tests.gating import TINY, data_case, gate, ragged, workload
from tests.parallel.test_hybrid import work as over_axes
from tests.pool import Rank

STRATEGIES = ["zero1", "zero2", "zero3"]

WORKLOADS = {
    "clipping": workload(num_micro_batches=2, clip_gradient_norm=0.1),
    "tied head, clipping": workload(
        TINY.model_copy(update={"tied_head": True}), num_micro_batches=2, clip_gradient_norm=0.1
    ),
    "recomputation": workload(recompute="full", num_micro_batches=2),
    "ragged": workload(num_micro_batches=3, data=ragged()),
    "sgd": workload(optimizer={"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.1}),
    "frozen, one element": workload("Frozen", num_micro_batches=2),
    "buffers": workload("Buffers", num_micro_batches=2),
    "in turn": workload("TurnByTurn", num_micro_batches=2),
    "by content": workload("Branches", num_micro_batches=2),
}


def options(strategy: str) -> dict[str, float]:
    return {"bucket_mib": 0.002} if strategy in ("zero1", "zero2") else {}


def run_gate(rank: Rank, strategy: str, size: int, work: Workload) -> GateResult | None:
    return gate(rank, work, data_case(strategy, size, **options(strategy)))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_at_every_size_and_accumulation(pools, strategy, size, num_micro_batches):
    """The tiny model has odd sizes throughout, so that parts end inside of parameters and are padded."""
    results = pools(4).run(run_gate, strategy, size, workload(num_micro_batches=num_micro_batches))
    for result in results[:size]:
        assert result.passed, result.reason
        assert result == results[0]
    assert results[size:] == [None] * (4 - size)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_passes_every_workload(pools, strategy, name):
    results = pools(2).run(run_gate, strategy, 2, WORKLOADS[name])
    assert results[0].passed, results[0].reason


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_where_there_are_more_ranks_than_elements(pools, strategy):
    """Parameters of one element, and buckets of one parameter: most ranks hold nothing but padding."""
    work = workload("Frozen", num_micro_batches=2, clip_gradient_norm=0.5)
    tiny = {"bucket_mib": 1e-6} if strategy in ("zero1", "zero2") else {}
    results = pools(4).run(run_with, strategy, tiny, work)
    assert results[0].passed, results[0].reason


def run_with(rank: Rank, strategy: str, chosen: dict[str, float], work: Workload) -> GateResult | None:
    return gate(rank, work, data_case(strategy, rank.world_size, **chosen))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_with_one_bucket_larger_than_the_model(pools, strategy):
    """The last bucket is never full before backward has ended."""
    chosen = {"bucket_mib": 1000.0} if strategy in ("zero1", "zero2") else {}
    results = pools(2).run(run_with, strategy, chosen, workload("Branches", num_micro_batches=3))
    assert results[0].passed, results[0].reason


def run_over_tensor(rank: Rank, case: Case) -> GateResult | None:
    return gate(rank, over_axes(case), case)


@pytest.mark.parametrize("tensor", ["megatron", "sequence"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "hybrid-sharded"])
def test_passes_over_tensor_groups(pools, strategy, tensor):
    """Norms and positions are shared by a tensor group, a tied head is used by two units: each has buckets of its own.

    `zero1`, which runs over pipelines too, is among the layouts of `tests/parallel/test_hybrid.py`.
    """
    chosen = {"num_shards": 2} if strategy == "hybrid-sharded" else options(strategy)
    names = {"data": strategy, "tensor": tensor}
    case = Case(name=strategy, layout=Layout(data=2, tensor=2), strategy=names, options=chosen)
    results = pools(4).run(run_over_tensor, case)
    assert results[0].passed, results[0].reason


def run_hybrid(rank: Rank, work: Workload) -> GateResult | None:
    return gate(rank, work, data_case("hybrid-sharded", 4, num_shards=2))


@pytest.mark.parametrize("name", ["clipping", "tied head, clipping", "frozen, one element"])
def test_hybrid_passes_with_two_replicas_of_two_shards(pools, name):
    results = pools(4).run(run_hybrid, WORKLOADS[name])
    assert results[0].passed, results[0].reason
