"""The libraries' sharded implementations pass the same gate."""

from __future__ import annotations

import importlib.util

import pytest

from raybench.suite.track import Workload
from raybench.worker.gate import GateResult
from tests.gating import TINY, data_case, gate, ragged, workload
from tests.pool import Rank

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is an optional peer (pip install 'raybench[peers]')",
)
TORCH = ["torch-zero1", "torch-fsdp2", "torch-fsdp2-keep"]
DEEPSPEED = [pytest.param(f"deepspeed-{stage}", marks=needs_deepspeed) for stage in (1, 2, 3)]
WORKLOADS = {
    "plain": workload(),
    "accumulation, clipping": workload(num_micro_batches=3, data=ragged(), clip_gradient_norm=0.1),
    "recomputation, schedule": workload(
        recompute="full", optimizer={"schedule": "cosine", "warmup_steps": 2, "schedule_steps": 5}
    ),
    "tied head": workload(TINY.model_copy(update={"tied_head": True})),
}


def run_gate(rank: Rank, strategy: str, work: Workload) -> GateResult | None:
    return gate(rank, work, data_case(strategy, rank.world_size))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("strategy", TORCH)
def test_torch_passes_the_gate(pools, strategy, name):
    results = pools(2).run(run_gate, strategy, WORKLOADS[name])
    assert results[0].passed, results[0].reason


@pytest.mark.slow  # its engine takes seconds to start
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("strategy", DEEPSPEED)
def test_deepspeed_passes_the_gate(pools, strategy, name):
    results = pools(2).run(run_gate, strategy, WORKLOADS[name])
    assert results[0].passed, results[0].reason


@pytest.mark.parametrize("strategy", [*TORCH, *DEEPSPEED])
def test_passes_at_three_ranks(pools, strategy):
    results = pools(3).run(run_gate, strategy, WORKLOADS["accumulation, clipping"])
    assert results[0].passed, results[0].reason
