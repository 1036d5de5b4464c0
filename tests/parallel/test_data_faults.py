"""Faults that data-parallel code has had in public, each with the right value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raybench.data.batches import Batch, Batches
from raybench.parallel.data.bucketed import Bucketed, assign
from raybench.parallel.data.order import FixedOrder
from raybench.parallel.data.replicated import UnusedParameterError, gradient
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Layout, Workload
from raybench.worker.build import build_control, build_strategy
from tests.gating import data_case, workload
from tests.pool import Rank

OURS = ["naive", "accumulated", "hooked", "overlapped", "bucketed"]
ALL = [*OURS, "torch-ddp"]


def build(rank: Rank, strategy: str, work: Workload, **options: object) -> Strategy:
    case = data_case(strategy, rank.world_size, **options)
    return build_strategy(work, case, rank.mesh(case.layout), rank.device)


def own_batch(rank: Rank, work: Workload, step: int = 0) -> Batch:
    return Batches(work, rank.world_size).batch(step, rank.rank)


def refused(rank: Rank, strategy: str) -> tuple[str, list[str]]:
    work = workload("UnusedOutput", num_micro_batches=2)
    built = build(rank, strategy, work)
    with rank.recorder.recording(step=0):
        rank.recorder.operations.clear()
        with pytest.raises(UnusedParameterError) as caught:
            built.step(own_batch(rank, work))
    sent = [o.label for o in rank.recorder.operations]
    built.close()
    return str(caught.value), sent


@pytest.mark.parametrize("strategy", ALL)
def test_parameters_nobody_uses_are_refused_by_name_before_anything_is_sent(pools, strategy):
    for message, sent in pools(2).run(refused, strategy):
        assert "extra.weight, extra.bias" in message
        assert "layer" not in message
        assert sent == ["parameters used"]


def mixed(rank: Rank, strategy: str) -> tuple[dict[str, float], dict[str, torch.dtype], list[int]]:
    """Relative gradient errors of a model with bf16 matrices and fp32 norms."""
    work = workload("Mixed", num_micro_batches=2)
    built = build(rank, strategy, work)
    built.step(own_batch(rank, work))
    control = build_control(work, rank.rank, rank.device, rank.recorder)
    control.step(Batches(work, rank.world_size).global_batch(0))
    expected = dict(control.full_gradients())
    errors, dtypes = {}, {}
    for name, value in built.full_gradients():
        difference = (value.float() - expected[name].float()).norm()
        errors[name] = float(difference / expected[name].float().norm())
        dtypes[name] = value.dtype
    sizes = [len({p.dtype for p in bucket.views}) for bucket in getattr(built, "buckets", [])]
    built.close()
    return errors, dtypes, sizes


@pytest.mark.parametrize("strategy", ALL)
def test_mixed_dtypes_reduce_in_their_own(pools, strategy):
    for errors, dtypes, dtypes_per_bucket in pools(2).run(mixed, strategy):
        assert dtypes["layer.weight"] == torch.bfloat16
        assert dtypes["norm.weight"] == torch.float32
        assert max(errors.values()) < 2e-2
        assert errors["projection.weight"] < 1e-5
        assert set(dtypes_per_bucket) <= {1}


def frozen(rank: Rank, strategy: str) -> tuple[list[str], list[float], list[float], float]:
    work = workload("Frozen", num_micro_batches=2, optimizer={"weight_decay": 0.5})
    built = build(rank, strategy, work)
    before = built.model.layer.weight.detach().clone()
    for step in range(2):
        built.step(own_batch(rank, work, step))
    after = built.model.layer.weight.detach()
    names = [name for name, _ in built.full_gradients()]
    temperature = float(dict(built.full_gradients())["temperature"])
    built.close()
    return names, before.flatten().tolist(), after.flatten().tolist(), temperature


@pytest.mark.parametrize("strategy", ALL)
def test_frozen_parameters_stay_and_one_element_gets_its_full_gradient(pools, strategy):
    results = pools(2).run(frozen, strategy)
    for names, before, after, temperature in results:
        assert "layer.weight" not in names
        assert "layer.bias" not in names
        assert before == after == results[0][1]  # the first rank's, on every rank
        assert temperature == results[0][3] != 0.0


def two_forwards(rank: Rank, strategy: str) -> tuple[int, list[float]]:
    work = workload("Buffers")
    built = build(rank, strategy, work)
    start = built.model.mean.tolist()
    forward = built.wrapped.wrapper if strategy == "torch-ddp" else built.model
    batch = own_batch(rank, work).micro_batches[0]
    first, second = forward(**batch.inputs), forward(**batch.inputs)
    (first.sum() + second.sum()).backward()
    built.close()
    return int(built.model.count), start


@pytest.mark.parametrize("strategy", ALL)
def test_buffers_are_broadcast_once_and_allow_two_forwards_before_backward(pools, strategy):
    results = pools(2).run(two_forwards, strategy)
    assert [count for count, _ in results] == [2, 2]
    assert results[0][1] == results[1][1]


def non_contiguous(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    axis = rank.mesh(Layout(data=rank.world_size)).data
    summed = torch.arange(12.0).view(3, 4).t() * (rank.rank + 1)
    sent = torch.full((4, 3), float(rank.rank)).t()
    sent.copy_(torch.arange(12.0).view(3, 4) + 100 * rank.rank)
    assert not summed.is_contiguous()
    assert not sent.is_contiguous()
    axis.all_reduce(summed, label="turned").wait()
    axis.broadcast(sent, label="turned").wait()
    return summed, sent


def test_non_contiguous_tensors_arrive_whole(pools):
    for summed, sent in pools(3).run(non_contiguous):
        assert torch.equal(summed, torch.arange(12.0).view(3, 4).t() * 6)
        assert torch.equal(sent, torch.arange(12.0).view(3, 4))


class Spied(Bucketed):
    """Keeps what each bucket held when it was sent."""

    def _send(self, bucket) -> None:
        for parameter in bucket.views:
            bucket.take(parameter)
        self.sent.append((bucket.label, bucket.gradient.clone()))
        super()._send(bucket)


def weight_gradients(rank: Rank) -> float:
    from raybench.worker.build import make_context, optimizer_factory

    work = workload(num_micro_batches=2)
    case = data_case("bucketed", 2, bucket_mib=0.002)
    context = make_context(work, case, rank.mesh(case.layout), rank.device, optimizer_factory(work.optimizer))
    built = Spied(context)
    built.sent = []
    worst = 0.0
    for step in range(2):
        batch = own_batch(rank, work, step)
        alone = build_control(work, rank.rank, rank.device, rank.recorder)
        with torch.no_grad():
            for (_, own), (_, theirs) in zip(alone.full_parameters(), built.full_parameters(), strict=True):
                own.copy_(theirs)
        built.sent.clear()
        built.step(batch)
        alone.step(batch)
        expected = {name: g.flatten() for name, g in alone.full_gradients()}
        names = {parameter: name for name, parameter in built.parameters.items()}
        assert len(built.sent) == len(built.buckets) > 2
        for bucket, (_, content) in zip(built.buckets, built.sent, strict=True):
            whole = torch.cat([expected[names[p]] for p in bucket.views])
            worst = max(worst, float((content - whole).norm() / whole.norm()))
    return worst


def test_a_bucket_holds_all_its_weight_gradients_when_it_is_sent(pools):
    assert max(pools(2).run(weight_gradients)) < 1e-5


def hook_counts(rank: Rank, strategy: str, num_micro_batches: int) -> list[tuple[int, int]]:
    """Of each step: how many gradient collectives began inside the last backward pass, and how many in all."""
    work = workload(num_micro_batches=num_micro_batches)
    options = {"bucket_mib": 0.002} if strategy == "bucketed" else {}
    built = build(rank, strategy, work, **options)
    built.step(own_batch(rank, work, 0))
    counts = []
    for step in range(1, 4):
        ended: list[int] = []
        original = built.after_backward

        def after_backward(last: bool, ended=ended, original=original) -> None:
            import time

            ended.append(time.time_ns())
            original(last)

        built.after_backward = after_backward
        rank.recorder.operations.clear()
        with rank.recorder.recording(step):
            built.step(own_batch(rank, work, step))
        del built.after_backward
        gradients = [o for o in rank.recorder.operations if o.label != "loss"]
        counts.append((sum(o.begin_ns < ended[-1] for o in gradients), len(gradients)))
    built.close()
    return counts


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", ["hooked", "overlapped", "bucketed"])
def test_hooks_fire_inside_backward_at_every_step(pools, strategy, num_micro_batches):
    for counts in pools(2).run(hook_counts, strategy, num_micro_batches):
        for inside, total in counts:
            assert inside == total > 2


@pytest.mark.parametrize("strategy", ["accumulated"])
def test_without_hooks_nothing_is_sent_inside_backward(pools, strategy):
    for counts in pools(2).run(hook_counts, strategy, 3):
        assert {inside for inside, _ in counts} == {0}


def test_naive_sends_every_micro_batch_and_accumulated_the_last(pools):
    naive = pools(2).run(hook_counts, "naive", 3)[0]
    accumulated = pools(2).run(hook_counts, "accumulated", 3)[0]
    assert {total for _, total in naive} == {3 * accumulated[0][1]}


def test_buckets_are_by_dtype_in_reverse_order_and_within_the_limit():
    parameters = [
        nn.Parameter(torch.zeros(n, dtype=dtype))
        for n, dtype in [(100, torch.float32), (10, torch.bfloat16), (30, torch.float32), (10, torch.bfloat16)]
    ]
    buckets = assign(parameters, limit_bytes=150)
    sizes = [[(p.numel(), p.dtype) for p in bucket] for bucket in buckets]
    assert sizes == [
        [(30, torch.float32)],
        [(10, torch.bfloat16), (10, torch.bfloat16)],
        [(100, torch.float32)],
    ]
    assert sorted(id(p) for b in buckets for p in b) == sorted(id(p) for p in parameters)


def test_fixed_order_sends_in_order_whatever_the_order_of_readiness():
    sent: list[str] = []
    order = FixedOrder(["a", "b", "c", "d"], sent.append)
    order.start()
    order.ready(1)
    assert sent == []
    order.ready(0)
    assert sent == ["a", "b"]
    order.flush()
    assert sent == ["a", "b", "c", "d"]
    order.start()
    order.flush()
    assert sent[4:] == ["a", "b", "c", "d"]


def test_a_gradient_that_is_missing_counts_as_zero():
    parameter = nn.Parameter(torch.ones(3))
    assert torch.equal(gradient(parameter), torch.zeros(3))
    assert parameter.grad is not None
