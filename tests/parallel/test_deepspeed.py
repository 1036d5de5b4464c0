"""The DeepSpeed peer, where DeepSpeed is installed."""

from __future__ import annotations

import pytest

from raybench.worker.gate import GateResult
from tests.gating import data_case, gate, ragged, workload
from tests.pool import Rank

pytest.importorskip("deepspeed", reason="DeepSpeed is an optional peer (pip install 'raybench[peers]')")


def run_gate(rank: Rank, size: int, work) -> GateResult | None:
    return gate(rank, work, data_case("deepspeed-0", size))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "work",
    [workload(), workload(num_micro_batches=3, data=ragged(), clip_gradient_norm=0.1)],
    ids=["plain", "accumulation and clipping"],
)
def test_deepspeed_stage_0_passes_the_gate(pools, size, work):
    results = pools(size).run(run_gate, size, work)
    assert results[0].passed, results[0].reason
