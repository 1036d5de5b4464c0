"""Both tensor strategies compute what one process computes, whatever the model's sizes and the data strategy."""

from __future__ import annotations

import pytest

from raybench.suite.track import Case, Layout, ModelConfig, Workload
from raybench.worker.gate import GateResult
from tests.gating import gate, ragged, workload
from tests.pool import Rank

SIXTHS = ModelConfig(num_layers=2, width=24, num_heads=12, ffn_width=36, vocabulary_size=61)
"""Divisible by 2, 3 and 4, but for the vocabulary."""
STRATEGIES = ["megatron", "sequence"]
PEERS = ["torch-dtensor", "torch-dtensor-sequence"]
DATA = ["naive", "accumulated", "hooked", "overlapped", "bucketed"]


def work(model: ModelConfig = SIXTHS, **changes: object) -> Workload:
    return workload(model, **{"sequence_length": 12, **changes})


def case(strategy: str, size: int, data: str | None = None) -> Case:
    layout = Layout(data=1 if data is None else 2, tensor=size)
    options = {"bucket_mib": 0.002} if data == "bucketed" else {}
    return Case(name=strategy, layout=layout, strategy={"data": data, "tensor": strategy}, options=options)


WORKLOADS = {
    "clipping": work(num_micro_batches=2, clip_gradient_norm=0.1),
    "tied head": work(SIXTHS.model_copy(update={"tied_head": True}), num_micro_batches=2),
    "recomputation": work(recompute="full"),
    "ragged": work(num_micro_batches=3, data=ragged()),
    "vocabulary one past": work(SIXTHS.model_copy(update={"vocabulary_size": 129})),
    "vocabulary smaller than the padding": work(SIXTHS.model_copy(update={"vocabulary_size": 5})),
    "bf16": work(precision="bf16"),
    "grouped heads": work(SIXTHS.model_copy(update={"num_kv_heads": 4})),
    "one key head": work(SIXTHS.model_copy(update={"num_kv_heads": 1}), clip_gradient_norm=0.1),
}


def run_gate(rank: Rank, work: Workload, case: Case) -> GateResult | None:
    return gate(rank, work, case)


def check(pools, work: Workload, case: Case) -> None:
    num_ranks = case.layout.num_ranks
    results = pools(2 if num_ranks == 2 else 4).run(run_gate, work, case)
    for result in results[:num_ranks]:
        assert result.passed, result.reason
        assert result == results[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_at_every_size(pools, strategy, size):
    check(pools, work(num_micro_batches=2), case(strategy, size))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_passes_every_workload(pools, strategy, name):
    check(pools, WORKLOADS[name], case(strategy, 2))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", PEERS)
def test_peers_pass(pools, strategy, size):
    model = SIXTHS.model_copy(update={"tied_head": True})
    check(pools, work(model, num_micro_batches=2, clip_gradient_norm=0.1), case(strategy, size))


@pytest.mark.parametrize("strategy", [*STRATEGIES, *PEERS])
def test_the_timed_model_passes(pools, strategy):
    model = ModelConfig(name="timed", num_layers=2, width=16, ffn_width=10, vocabulary_size=61)
    check(pools, work(model, num_micro_batches=2, clip_gradient_norm=0.1), case(strategy, 2))


@pytest.mark.parametrize("strategy", [*STRATEGIES, *PEERS])
def test_passes_under_torchs_ddp(pools, strategy):
    check(pools, work(num_micro_batches=2), case(strategy, 2, "torch-ddp"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("data", DATA)
def test_passes_under_every_data_strategy(pools, strategy, data):
    model = SIXTHS.model_copy(update={"tied_head": True, "num_kv_heads": 1})
    check(pools, work(model, num_micro_batches=2, clip_gradient_norm=0.1), case(strategy, 2, data))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_key_heads_over_four_ranks(pools, strategy):
    """Each is held by two ranks, whose gradients of it are summed and counted once in the norm."""
    model = SIXTHS.model_copy(update={"num_kv_heads": 2})
    check(pools, work(model, num_micro_batches=2, clip_gradient_norm=0.1), case(strategy, 4))
