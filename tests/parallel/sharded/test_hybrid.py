"""Sharding within a node, replicas across: who shards with whom, and what is refused."""

from __future__ import annotations

import pytest

from raybench.data.batches import Batches
from raybench.errors import RequestError
from raybench.suite.track import Case, Layout
from raybench.worker.build import build_strategy
from raybench.worker.mesh import axis_ranks, shards_of_a_copy
from tests.gating import data_case, workload
from tests.pool import Rank


def hybrid(data: int, tensor: int = 1) -> Case:
    names = {"data": "hybrid-sharded"}
    return Case(name="hybrid", layout=Layout(data=data, tensor=tensor), strategy=names)


@pytest.mark.parametrize(
    ("nodes", "expected"), [("aabb", 2), ("aaaa", 4), ("aaabbb", 3), ("aabbcc", 2), ("aaaaaabbbbbb", 6)]
)
def test_the_ranks_of_a_node_shard_together(nodes, expected):
    assert shards_of_a_copy(hybrid(len(nodes)), nodes) == expected


@pytest.mark.parametrize(("nodes", "sizes"), [("ab", "1, 1"), ("aaab", "3, 1"), ("abc", "1, 1, 1")])
def test_nodes_that_would_shard_nothing_are_refused(nodes, sizes):
    with pytest.raises(RequestError, match=rf"shards nothing where the nodes hold {sizes} data ranks .allowed: "):
        shards_of_a_copy(hybrid(len(nodes)), nodes)


def test_other_strategies_shard_along_the_whole_data_axis():
    assert shards_of_a_copy(data_case("zero3", 4), "aabb") is None
    ranks = axis_ranks(Layout(data=4), range(4), 2)
    assert ranks["shards"] == ranks["data"]
    assert ranks["replicas"] == (2,)


def test_shards_are_neighbours_and_replicas_hold_the_same_part():
    layout = Layout(data=4, tensor=2)
    seen = {place: axis_ranks(layout, range(8), place, 2) for place in range(8)}
    assert seen[0]["shards"] == (0, 2)
    assert seen[0]["replicas"] == (0, 4)
    assert seen[7]["shards"] == (5, 7)
    assert seen[7]["replicas"] == (3, 7)


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (1, "1 shards nothing .allowed: 2, 4"),
        (3, "3 does not divide layout.data 4 .allowed: 2, 4"),
        (0, "0 is not allowed"),
    ],
)
def test_numbers_of_shards_that_cannot_be_are_refused(shards, words):
    with pytest.raises(ValueError, match=rf"options.num_shards: {words}"):
        data_case("hybrid-sharded", 4, num_shards=shards)


def test_a_layout_that_would_shard_nothing_is_refused():
    with pytest.raises(ValueError, match=r"layout.nodes: 2 leaves one .* hybrid-sharded shards nothing .allowed: "):
        Case(name="hybrid", layout=Layout(data=2, nodes=2), strategy={"data": "hybrid-sharded"})


def held(rank: Rank) -> tuple[int, int, list[str]]:
    work = workload()
    case = data_case("hybrid-sharded", 4, num_shards=2)
    built = build_strategy(work, case, rank.mesh(case.layout, 2), rank.device)
    source = Batches(work, 4)
    built.step(source.batch(0, rank.rank))
    rank.recorder.operations.clear()
    with rank.recorder.recording(step=1):
        built.step(source.batch(1, rank.rank))
    counted = built.state_bytes()
    whole = sum(p.numel() for _, p in built.full_parameters())
    axes = sorted({f"{o.kind} {o.axis}" for o in rank.recorder.operations})
    built.close()
    return whole, counted.parameters + counted.gradients + counted.optimizer, axes


def test_states_are_divided_by_the_shards_of_a_copy_and_sums_cross_nodes_once(pools):
    for whole, num_bytes, axes in pools(4).run(held):
        assert num_bytes == pytest.approx(16 * whole / 2, rel=0.01)
        assert axes == [
            "all_gather shards",
            "all_reduce all",
            "all_reduce replicas",
            "all_reduce shards",
            "reduce_scatter shards",
        ]
