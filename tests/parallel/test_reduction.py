"""Gradients of low precision are summed in fp32 and rounded once: many small ones do not vanish beside a large one."""

from __future__ import annotations

import pytest
import torch

from raybench.data.batches import Batches
from raybench.parallel.data.reduction import GradientSum
from raybench.suite.track import Layout
from raybench.worker.build import build_control, build_strategy
from tests.gating import data_case, workload
from tests.pool import Rank

OURS = ["naive", "accumulated", "hooked", "overlapped", "bucketed"]


def add_small_ones(rank: Rank, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rank has summed 256 equal gradients, each other one has one more; and the same summed as it comes."""
    axis = rank.mesh(Layout(data=rank.world_size)).data
    right = torch.full((37,), 256.0 if rank.rank == 0 else 1.0, dtype=dtype)
    wrong = right.clone()
    GradientSum(axis, right, label="small").wait()
    axis.all_reduce(wrong, label="small").wait()
    return right, wrong


def test_259_equal_gradients(pools):
    for right, wrong in pools(4).run(add_small_ones, torch.bfloat16):
        assert right.dtype == torch.bfloat16
        assert set(right.tolist()) == {260.0}  # 259 is half-way between two numbers of bf16
        assert 256.0 in wrong.tolist()  # what the test is about: adding one by one in bf16 adds nothing
    for right, _ in pools(4).run(add_small_ones, torch.float32):
        assert set(right.tolist()) == {259.0}


def sums(rank: Rank, strategy: str, num_micro_batches: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each bf16 parameter: its gradient, and the ranks' own gradients summed exactly and rounded once."""
    work = workload("Mixed", num_micro_batches=num_micro_batches, micro_batch_size=8)
    case = data_case(strategy, rank.world_size)
    mesh = rank.mesh(case.layout)
    built = build_strategy(work, case, mesh, rank.device)
    alone = build_control(work, rank.rank, rank.device, rank.recorder)
    for (_, own), (_, theirs) in zip(alone.full_parameters(), built.full_parameters(), strict=True):
        own.copy_(theirs)
    batch = Batches(work, rank.world_size).batch(0, rank.rank)
    alone.step(batch)
    built.step(batch)
    result = {}
    for name, whole in built.full_gradients():
        parts = mesh.data.gather_objects(dict(alone.full_gradients())[name])
        exact = torch.stack([part.double() for part in parts]).sum(0)
        if whole.dtype == torch.bfloat16:
            result[name] = (whole.clone(), exact.to(torch.bfloat16))
    built.close()
    return result


@pytest.mark.parametrize("strategy", OURS)
def test_a_bf16_parameters_gradient_is_the_exact_sum_rounded_once(pools, strategy):
    for result in pools(4).run(sums, strategy, 1):
        assert set(result) == {"layer.weight", "layer.bias"}
        for name, (whole, exact) in result.items():
            assert torch.equal(whole, exact), name


@pytest.mark.parametrize("strategy", [s for s in OURS if s != "naive"])
def test_also_over_micro_batches(pools, strategy):
    """Each rank's own sum over micro-batches is torch's, in the parameter's precision; naive rounds more often."""
    for result in pools(3).run(sums, strategy, 3):
        for name, (whole, exact) in result.items():
            assert torch.equal(whole, exact), name
