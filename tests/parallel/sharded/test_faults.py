"""Faults that sharded strategies have had in public: the gate finds them planted, and ours do the right thing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from raybench.data.batches import Batches
from raybench.parallel.data.replicated import UnusedParameterError
from raybench.parallel.sharded.units import split
from raybench.parallel.sharded.zero1 import ShardedBucket, Zero1
from raybench.parallel.sharded.zero2 import TransientBucket, Zero2
from raybench.parallel.sharded.zero3 import GatheredBucket, Zero3
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Case, Layout, Workload
from raybench.worker.build import build_control, build_strategy
from raybench.worker.gate import GateResult
from tests.gating import TINY, data_case, gate, ragged, workload
from tests.models import Frozen, Small
from tests.pool import Rank

STRATEGIES = ["zero1", "zero2", "zero3"]


class ShardOffByOne(Zero1):
    """Each rank trains one element beside the part whose gradient it has."""

    def make_bucket(self, label, parameters, sharing):
        bucket = super().make_bucket(label, parameters, sharing)
        begin = bucket.axis.index * bucket.part.numel()
        flat = bucket.flat.detach().roll(-1)
        bucket.shard = torch.nn.Parameter(flat[begin : begin + bucket.part.numel()].clone())
        bucket.write_back = lambda: bucket.part.copy_(bucket.shard.detach().roll(1))
        return bucket


class EarlierMicroBatchLost(Zero2):
    """Every micro-batch's sum takes the place of what was there."""

    def make_bucket(self, label, parameters, sharing):
        class Forgetful(TransientBucket):
            def reduce(self):
                self.wait()
                self._summed = False
                super().reduce()

        return Forgetful(label, parameters, sharing, self.shards)


class LastBucketNotFlushed(Zero2):
    """What no hook has completed is never sent."""

    def after_backward(self, last):
        pass


class StaleParametersGathered(Zero3):
    """From the second step on, ranks send what they sent in the step before."""

    def make_bucket(self, label, parameters, sharing):
        class Stale(GatheredBucket):
            def publish(self):
                late = self.part.clone()
                self.part = getattr(self, "late", late)
                self.late = self.shard.detach().clone()

        return Stale(label, parameters, sharing, self.shards)


class NotGatheredAgain(Zero1):
    """Each rank keeps its old copy of the parts that others train."""

    def update(self):
        for bucket in self.buckets:
            bucket.publish = lambda: None
        super().update()


FAULTS = {
    ShardOffByOne: (workload(num_micro_batches=2), "update of"),
    EarlierMicroBatchLost: (workload(num_micro_batches=3, data=ragged(2)), "gradient of"),
    LastBucketNotFlushed: (workload("TurnByTurn", num_micro_batches=2), "gradient of"),
    StaleParametersGathered: (workload(), ""),
    NotGatheredAgain: (workload(), "update of"),
}


def run_fault(rank: Rank, fault: type, work: Workload) -> GateResult | None:
    name = next(s for s in STRATEGIES if s == fault.__bases__[0].__name__.lower())
    options = {"bucket_mib": 0.002} if name != "zero3" else {}
    return gate(rank, work, data_case(name, 2, **options), make=fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_found(pools, fault):
    work, words = FAULTS[fault]
    results = pools(2).run(run_fault, fault, work)
    assert results[0] == results[1]
    assert not results[0].passed
    assert words in results[0].reason


def build(rank: Rank, strategy: str, work: Workload, **options: object) -> Strategy:
    case = data_case(strategy, rank.world_size, **options)
    return build_strategy(work, case, rank.mesh(case.layout), rank.device)


def refused(rank: Rank, strategy: str) -> str:
    work = workload("UnusedOutput", num_micro_batches=2)
    built = build(rank, strategy, work)
    with pytest.raises(UnusedParameterError) as caught:
        built.step(Batches(work, rank.world_size).batch(0, rank.rank))
    built.close()
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_nobody_uses_are_refused_by_name_in_the_first_step(pools, strategy):
    for message in pools(2).run(refused, strategy):
        assert "extra.weight, extra.bias" in message
        assert "layer" not in message


def mixed(rank: Rank, strategy: str) -> tuple[dict[str, float], set[int], list[torch.dtype], int]:
    work = workload("Mixed", num_micro_batches=2)
    built = build(rank, strategy, work)
    built.step(Batches(work, rank.world_size).batch(0, rank.rank))
    control = build_control(work, rank.rank, rank.device, rank.recorder)
    control.step(Batches(work, rank.world_size).global_batch(0))
    expected = dict(control.full_gradients())
    errors = {
        name: float((value.float() - expected[name].float()).norm() / expected[name].float().norm())
        for name, value in built.full_gradients()
    }
    dtypes = {len({p.dtype for p in bucket.parameters}) for bucket in built.buckets}
    masters = [bucket.shard.dtype for bucket in built.buckets]
    num_bf16 = sum(bucket.shard.numel() for bucket in built.buckets if bucket.has_master)
    master_bytes = built.state_bytes().optimizer - sum(8 * bucket.shard.numel() for bucket in built.buckets)
    built.close()
    return errors, dtypes, masters, master_bytes - 4 * num_bf16


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_dtypes_have_buckets_of_their_own_and_fp32_masters(pools, strategy):
    for errors, dtypes_per_bucket, masters, unexplained in pools(2).run(mixed, strategy):
        assert max(errors.values()) < 2e-2
        assert errors["projection.weight"] < 1e-5
        assert dtypes_per_bucket == {1}
        assert set(masters) == {torch.float32}
        assert unexplained == 0


def small_steps(rank: Rank, strategy: str) -> tuple[float, float]:
    """How far a bf16 matrix and its fp32 master went in 20 steps, each below what bf16 resolves."""
    work = workload("Mixed", optimizer={"learning_rate": 1e-5, "weight_decay": 0.0})
    built = build(rank, strategy, work)
    bucket = next(b for b in built.buckets if b.has_master)
    before = bucket.shard.detach().clone()
    rounded = bucket.part.float().clone()
    for step in range(20):
        built.step(Batches(work, rank.world_size).batch(step, rank.rank))
    built.settle()
    moved = float((bucket.shard - before).norm() / before.norm()), float((bucket.part.float() - bucket.shard).norm())
    built.close()
    assert rounded.shape == before.shape
    return moved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_too_small_for_bf16_add_up_in_the_master(pools, strategy):
    for moved, rounding in pools(2).run(small_steps, strategy):
        assert moved > 1e-4
        assert rounding < 0.02


def frozen(rank: Rank, strategy: str) -> tuple[list[float], list[float], float, list[str]]:
    work = workload("Frozen", num_micro_batches=2, optimizer={"weight_decay": 0.5})
    built = build(rank, strategy, work)
    before = built.model.layer.weight.detach().clone()
    for step in range(2):
        built.step(Batches(work, rank.world_size).batch(step, rank.rank))
    gradients = dict(built.full_gradients())
    after = built.model.layer.weight.detach()
    sharded = [str(tuple(shape)) for bucket in built.buckets for shape in bucket.shapes]
    built.close()
    return before.flatten().tolist(), after.flatten().tolist(), float(gradients["temperature"]), sharded


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_stay_out_and_one_element_gets_its_full_gradient(pools, strategy):
    results = pools(2).run(frozen, strategy)
    for before, after, temperature, sharded in results:
        assert before == after == results[0][0]
        assert temperature == results[0][2] != 0.0
        assert "(12, 12)" not in sharded


class Alone:
    """An axis of several ranks, seen without them."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size


@pytest.mark.parametrize("size", [2, 3, 5, 64])
def test_parts_are_equal_and_cover_every_element_once(size):
    parts, held = [], torch.cat([p.detach().flatten() for p in Small().parameters()])
    for index in range(size):
        torch.manual_seed(0)
        parameters = list(Small().parameters())
        parts.append(ShardedBucket("b", parameters, None, Alone(index, size)).part)
    torch.manual_seed(0)
    held = torch.cat([p.detach().flatten() for p in Small().parameters()])
    assert len({len(part) for part in parts}) == 1
    together = torch.cat(parts)
    assert torch.equal(together[: len(held)], held)
    assert not together[len(held) :].any()
    assert len(together) - len(held) < size


def test_units_are_embedding_blocks_head_or_top_level_children():
    from raybench.models.gpt import GPT

    model = GPT(TINY.model_copy(update={"tied_head": True}), 9)
    units, rest = split(model, model.parameters())
    assert [unit.name for unit in units] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert [p is model.embedding.token.weight for p in rest] == [True]
    model = Frozen()
    trained = [p for p in model.parameters() if p.requires_grad]
    units, rest = split(model, trained)
    assert [unit.name for unit in units] == ["embedding", "projection"]
    assert {id(p) for p in rest} == {id(model.temperature), id(model.offset), id(model.turned)}


def whole_at_once(rank: Rank, num_micro_batches: int, recompute: str) -> tuple[int, int, int]:
    """Most units gathered at one time in a step, units gathered after it, and elements of released parameters."""
    work = workload(TINY.model_copy(update={"num_layers": 5}), num_micro_batches=num_micro_batches, recompute=recompute)
    built = build(rank, "zero3", work)
    units = [*built._forward._units]
    most = 0

    def count(*_):
        nonlocal most
        most = max(most, sum(unit.is_gathered for unit in units))

    hooks = [m.register_forward_hook(count) for m in built.model.modules() if not list(m.children())]
    hooks += [p.register_post_accumulate_grad_hook(count) for p in built.parameters.values()]
    built.step(Batches(work, rank.world_size).batch(0, rank.rank))
    for hook in hooks:
        hook.remove()
    left = sum(unit.is_gathered for unit in units)
    elements = sum(p.numel() for p in built.parameters.values())
    built.close()
    return most, left, elements


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_stage_3_never_has_more_than_two_units_whole(pools, num_micro_batches, recompute):
    for most, left, elements in pools(2).run(whole_at_once, num_micro_batches, recompute):
        assert most == 2
        assert left == 0
        assert elements == 0


def gathers(rank: Rank) -> dict[str, int]:
    """How often one step gathers each unit."""
    built = build(rank, "zero3", workload(TINY.model_copy(update={"num_layers": 3})))
    source = Batches(workload(), rank.world_size)
    built.step(source.batch(0, rank.rank))
    rank.recorder.operations.clear()
    with rank.recorder.recording(step=1):
        built.step(source.batch(1, rank.rank))
    counts = Counter(o.label for o in rank.recorder.operations if o.kind == "all_gather")
    labels = {p: bucket.label for bucket in built.buckets for p in bucket.parameters}
    found = {unit.name: counts[labels[unit.parameters[0]]] for unit in built._model_units}
    built.close()
    return found


def test_backward_gathers_what_needs_it_and_is_not_there_yet(pools):
    for found in pools(2).run(gathers):
        assert found == {"embedding": 1, "blocks.0": 2, "blocks.1": 2, "blocks.2": 2, "head": 1}


def run_over_a_pipeline(rank: Rank) -> tuple[list[str], list[int]]:
    """Blocks that run before their parameters are there; how many buckets are still under way after each step."""
    work = workload(TINY.model_copy(update={"num_layers": 4}), num_micro_batches=2)
    case = Case(
        name="zero1",
        layout=Layout(data=2, pipeline=2),
        strategy={"data": "zero1", "pipeline": "one-f-one-b"},
        options={"bucket_mib": 0.002},
    )
    mesh = rank.mesh(case.layout)
    strategy = build_strategy(work, case, mesh, rank.device)
    bucket_of = {parameter: bucket for bucket in strategy.buckets for parameter in bucket.parameters}
    early: list[str] = []

    def look(name: str, block: torch.nn.Module) -> None:
        if any(bucket_of[parameter].gathering is not None for parameter in block.parameters()):
            early.append(name)

    for name, block in strategy.model.blocks.named_children():
        block.register_forward_pre_hook(lambda block, _, name=name: look(name, block))
    under_way = []
    for step in range(3):
        strategy.step(Batches(work, 2).batch(step, mesh.data.index))
        under_way.append(sum(bucket.gathering is not None for bucket in strategy.buckets))
    strategy.close()
    return early, under_way


def test_blocks_of_a_pipeline_stage_wait_for_their_parameters(pools):
    for early, under_way in pools(4).run(run_over_a_pipeline):
        assert early == []
        assert min(under_way) > 2
