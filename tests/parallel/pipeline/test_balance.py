"""Layers on stages: every one once, the slowest stage as fast as can be, what cannot be refused."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest

from raybench.errors import RequestError
from raybench.models.build import outline
from raybench.parallel.pipeline.balance import balance, placed
from raybench.parallel.pipeline.stage import Costs, counted_costs
from raybench.suite.track import ModelConfig, Workload


@pytest.mark.parametrize("num_layers", range(1, 14))
@pytest.mark.parametrize("num_stages", range(1, 6))
def test_every_layer_is_on_exactly_one_stage_or_refused(num_layers, num_stages):
    if num_layers < num_stages:
        with pytest.raises(RequestError, match=f"nearest: {num_layers} stages, or {num_stages} layers"):
            balance([1.0] * num_layers, num_stages=num_stages)
        return
    for head in (0.0, 0.4, 5.3):
        stages = balance([1.0] * num_layers, num_stages=num_stages, embedding=0.1, head=head)
        assert len(stages) == num_stages
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert all(stages[1:-1])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize(("embedding", "head"), [(0.0, 0.0), (0.2, 1.7), (3.0, 0.5), (0.0, 9.0)])
def test_no_other_placement_has_a_faster_slowest_stage(num_stages, embedding, head):
    costs = [1.0, 1.5, 0.5, 2.0, 1.0, 1.0, 0.7]

    def slowest(bounds):
        sums = [sum(costs[a:b]) for a, b in zip((0, *bounds), (*bounds, len(costs)), strict=True)]
        sums[0] += embedding
        sums[-1] += head
        return max(sums)

    stages = balance(costs, num_stages=num_stages, embedding=embedding, head=head)
    ours = slowest([stage.stop for stage in stages[:-1]])
    inner = combinations_with_replacement(range(len(costs) + 1), num_stages - 1)
    possible = [b for b in inner if all(y > x for x, y in pairwise(b))]
    assert ours == pytest.approx(min(map(slowest, possible)))


def test_layers_of_one_cost_are_spread_evenly():
    assert [len(stage) for stage in balance([1.0] * 8, num_stages=4)] == [2, 2, 2, 2]
    assert sorted(len(stage) for stage in balance([1.0] * 9, num_stages=4)) == [2, 2, 2, 3]


def test_a_heavy_head_leaves_the_last_stage_fewer_layers():
    assert [len(stage) for stage in balance([1.0] * 12, num_stages=2, head=5.3)] == [9, 3]
    assert [len(stage) for stage in balance([1.0] * 12, num_stages=4, head=5.3)] == [4, 4, 4, 0]


def test_a_case_may_say_how_many_layers_each_stage_holds():
    assert placed([2, 1, 3], num_layers=6, num_stages=3) == (range(0, 2), range(2, 3), range(3, 6))
    for layers, message in [
        ([2, 4], "not one for each of 3 stages"),
        ([2, 2, 3], "7 layers in all"),
        ([3, 0, 3], "empty"),
    ]:
        with pytest.raises(RequestError, match=message):
            placed(layers, num_layers=6, num_stages=3)


def test_costs_are_counted_from_the_model():
    """The published GPT: its head weighs five layers, its embedding next to nothing; a timed model's layers alone."""
    work = Workload(micro_batch_size=2, sequence_length=128)
    costs = counted_costs(outline(work, 0), work)
    assert len(set(costs.blocks)) == 1
    assert costs.head / costs.blocks[0] == pytest.approx(5.3, abs=0.1)
    assert costs.embedding / costs.blocks[0] == pytest.approx(0.02, abs=0.01)
    stages = balance(costs.blocks, num_stages=2, embedding=costs.embedding, head=costs.head)
    assert [len(stage) for stage in stages] == [9, 3]
    timed = Workload(model=ModelConfig(name="timed", num_layers=4))
    assert counted_costs(outline(timed, 0), timed) == Costs(0.0, [1.0] * 4, 0.0)
