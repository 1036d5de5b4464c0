"""What runs where: fitting, placing, and the words for what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.suite.catalog import Target, find_tracks
from raybench.suite.estimate import estimate_track, rank_bytes
from raybench.suite.plan import plan_track
from raybench.suite.request import Request
from raybench.suite.session import prepare
from raybench.suite.track import Case
from raybench.suite.track_file import Track

from .fakes import cluster, make_track, node

TWO_NODES = {"base": {"data": 2}, "wide": {"data": 4, "nodes": 2}}


def reasons(plan) -> dict[str, str]:
    return {case.name: reason for case, reason in plan.skipped}


def shares(plan) -> list[tuple[str, int]]:
    return [(share.address, share.num_ranks) for share in plan.placement.nodes]


def test_at_smoke_every_layout_fits_and_the_plan_says_that_cores_are_shared():
    plan = plan_track(make_track(TWO_NODES), cluster(node(cpus=2)))
    assert [case.name for case in plan.runnable] == ["base", "wide"]
    assert plan.backend == "gloo"
    assert shares(plan) == [("10.0.0.1", 4)]
    assert plan.placement.cpus_per_rank == 0.5
    assert plan.shares_cores
    assert plan.placement.strategy == "PACK"


def test_two_nodes_take_half_the_ranks_each_and_the_baseline_is_on_the_first():
    plan = plan_track(make_track(TWO_NODES), cluster(node("10.0.0.1"), node("10.0.0.2")))
    assert shares(plan) == [("10.0.0.1", 2), ("10.0.0.2", 2)]
    assert [plan.placement.num_nodes(case.layout.num_ranks) for case in plan.runnable] == [1, 2]
    assert plan.placement.node_ids == ["id-10.0.0.1"] * 2 + ["id-10.0.0.2"] * 2
    assert plan.placement.strategy == "SPREAD"
    assert not plan.shares_cores


@pytest.mark.parametrize(
    ("nodes", "wide"),
    [
        ([node(gpus=2)], "needs 2 nodes, the cluster has 1"),
        ([node("10.0.0.1", gpus=2), node("10.0.0.2", gpus=0)], "needs 4 GPUs, the cluster has 2"),
        (
            [node("10.0.0.1", gpus=2), node("10.0.0.2", gpus=2, free_gpus=0)],
            "needs 4 GPUs, 2 of the cluster's 4 are free",
        ),
        (
            [node("10.0.0.1", gpus=3), node("10.0.0.2", gpus=1)],
            "needs 2 GPUs on each of 2 nodes, the largest node has 3 free",
        ),
    ],
)
def test_at_full_what_does_not_fit_is_skipped_in_words(nodes, wide):
    plan = plan_track(make_track(TWO_NODES, scale="full"), cluster(*nodes))
    assert reasons(plan) == {"wide": wide}
    assert [case.name for case in plan.runnable] == ["base"]
    assert plan.backend == "nccl"
    assert plan.placement.use_gpu


def test_gpus_of_one_node():
    two = cluster(*(node(f"n{i}", gpus=2) for i in (1, 2)))
    plan = plan_track(make_track({"wide": {"data": 4}}, scale="full"), two)
    assert reasons(plan) == {"wide": "needs 4 GPUs on one node, the largest node has 2 free"}
    assert plan.placement is None


def test_a_smoke_run_on_too_few_gpus_is_all_on_cpus():
    plan = plan_track(make_track(TWO_NODES), cluster(node(gpus=2)))
    assert (plan.backend, len(plan.runnable)) == ("gloo", 2)
    plan = plan_track(make_track(TWO_NODES), cluster(node(gpus=4)))
    assert (plan.backend, len(plan.runnable), shares(plan)) == ("nccl", 2, [("10.0.0.1", 4)])


def test_full_without_gpus_is_the_users_wish():
    request = Request(targets=(), results="r", scale="full")
    prepared = prepare(request, cluster(node("a"), node("b")))
    assert prepared.notes == ("scale full without GPUs: these are sizes for GPUs, a step may take minutes",)
    plan = plan_track(make_track(TWO_NODES, scale="full"), cluster(node("a"), node("b")))
    assert (plan.backend, len(plan.runnable)) == ("gloo", 2)


def test_a_cluster_without_free_cpus():
    full = cluster(node("a", free_cpus=0.0), node("b", free_cpus=0.0))
    plan = plan_track(make_track(TWO_NODES), full)
    assert set(reasons(plan).values()) == {"needs a free CPU, the cluster has none (all 4 are taken by other jobs)"}
    part = plan_track(make_track(TWO_NODES), cluster(node("a", free_cpus=0.0), node("b", free_cpus=1.0)))
    assert shares(part) == [("b", 4)]
    assert part.placement.cpus_per_rank == 0.25


def test_peers():
    track = Track(find_tracks()["a-ddp-one-node"]).resolve("smoke")
    plan = plan_track(track, cluster(), peers=False)
    assert reasons(plan) == {"torch-ddp": "peer of torch: left out by --no-peers"}


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    from raybench.parallel import registry

    entry = registry.Entry("raybench.none:None", "deepspeed", requires="no_such_library")
    monkeypatch.setitem(registry.REGISTRY["data"], "bucketed", entry)
    plan = plan_track(make_track({"one": {"data": 2}}), cluster())
    assert reasons(plan) == {"one": "needs no_such_library, which is not installed (pip install 'raybench[peers]')"}


def test_cases_that_cannot_be_placed_side_by_side_at_full():
    track = make_track({"spread": {"data": 2, "nodes": 2}, "wide": {"data": 4, "nodes": 2}}, scale="full")
    plan = plan_track(track, cluster(node("a", gpus=2), node("b", gpus=2)))
    assert reasons(plan) == {
        "spread": "its 2 ranks would be on 1 node, not 2, beside the other cases of its track (run it alone: t:spread)"
    }


NODES = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 8), st.booleans()), min_size=1, max_size=4)
LAYOUTS = st.tuples(st.integers(2, 8), st.integers(1, 4)).filter(lambda pair: pair[0] % pair[1] == 0)


@settings(max_examples=150, deadline=None)
@given(NODES, st.lists(LAYOUTS, min_size=1, max_size=4), st.sampled_from(["smoke", "full"]))
def test_every_case_is_placed_within_the_cluster_or_has_a_reason(nodes, layouts, scale):
    here = cluster(
        *(
            node(f"n{i}", cpus=cpus, gpus=gpus, free_gpus=gpus // 2 if busy else gpus)
            for i, (cpus, gpus, busy) in enumerate(nodes)
        )
    )
    cases = {f"c{i}": {"data": data, "nodes": count} for i, (data, count) in enumerate(layouts)}
    plan = plan_track(make_track(cases, scale=scale), here)
    assert {case.name for case in plan.runnable} | set(reasons(plan)) == set(cases)
    assert not {case.name for case in plan.runnable} & set(reasons(plan))
    assert (plan.placement is None) == (not plan.runnable)
    if plan.placement is None:
        return
    placement = plan.placement
    assert placement.num_ranks == max(case.layout.num_ranks for case in plan.runnable)
    assert len({share.address for share in placement.nodes}) == len(placement.nodes)
    capacity = {n.address: n for n in here.nodes}
    for share in placement.nodes:
        there = capacity[share.address]
        assert share.num_ranks * placement.cpus_per_rank <= there.free_cpus
        assert not placement.use_gpu or share.num_ranks <= there.free_gpus
    for case in plan.runnable:
        used = placement.num_nodes(case.layout.num_ranks)
        assert used == case.layout.nodes or (scale == "smoke" and used <= placement.num_nodes(8))


def test_estimates():
    plan = plan_track(Track(find_tracks()["a-ddp-one-node"]).resolve("full"), cluster(node(gpus=2)))
    case = plan.track.cases[0]
    states = 162_349_056 * 16
    assert states < rank_bytes(plan.track, case) < 2.5 * states
    assert estimate_track(plan).seconds > 20
    smoke = plan_track(Track(find_tracks()["a-ddp-one-node"]).resolve("smoke"), cluster(node(cpus=2)))
    assert 20 < estimate_track(smoke).seconds < 600


def test_an_estimate_knows_that_a_timed_model_waits():
    track = Track(find_tracks()["e-pipeline-4"]).resolve("smoke")
    options = track.workload.model.options
    longer = track.model_copy(
        update={
            "workload": track.workload.model_copy(
                update={
                    "model": track.workload.model.model_copy(
                        update={"options": {key: 10 * ms for key, ms in options.items()}}
                    )
                }
            )
        }
    )
    seconds = [estimate_track(plan_track(t, cluster(node(cpus=2)))).seconds for t in (track, longer)]
    measure, cases = track.measure, len(track.cases)
    steps = measure.num_rounds * (measure.num_steps + measure.num_warmup_steps)
    # 4 stages of 2 blocks of 9 ms, 4 micro-batches: 7 times 18 ms a step; the control 4 times 72 ms.
    least = steps * (cases * 7 * 0.018 + 4 * 0.072)
    assert least < seconds[0] < 3 * least + 40
    assert seconds[1] - seconds[0] > 9 * least


def tensor_track(scale: str, **layout: int):
    """One case of tensor groups, alone or over data."""
    data = "bucketed" if layout.get("data", 1) > 1 else None
    case = Case(name="megatron", layout=layout, strategy={"data": data, "tensor": "megatron"})
    return make_track({"base": {"data": 2}}, scale=scale).model_copy(update={"cases": (case,)})


def test_tensor_groups_are_whole_on_their_nodes_where_that_can_be():
    nodes = cluster(node("10.0.0.1", gpus=4), node("10.0.0.2", gpus=4))
    plan = plan_track(tensor_track("full", data=3, tensor=2, nodes=2), nodes)
    assert shares(plan) == [("10.0.0.1", 4), ("10.0.0.2", 2)]
    assert plan.num_crossing(plan.runnable[0]) == 0


def test_a_tensor_group_larger_than_a_node_is_said_aloud(tmp_path):
    path = tmp_path / "wide.yaml"
    path.write_text(
        "{title: T, question: Q, workload: {model: {num_heads: 4, width: 8, ffn_width: 8, vocabulary_size: 16}}, "
        "cases: [{name: megatron, layout: {tensor: 4, nodes: 2}, strategy: {tensor: megatron}}]}"
    )
    request = Request(targets=(Target(Track(path)),), scale="full", results="r", launcher="torchrun")
    prepared = prepare(request, cluster(node("10.0.0.1", gpus=2), node("10.0.0.2", gpus=2)))
    assert prepared.notes == ("wide:megatron: 1 of 1 tensor groups across nodes",)


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [({"tensor": 8}, "1x1x4"), ({"data": 2, "tensor": 4}, "1x1x4, 2x1x2"), ({"tensor": 5}, "1x1x1")],
)
def test_a_layout_larger_than_the_cluster_is_refused_with_the_nearest(layout, nearest):
    plan = plan_track(tensor_track("full", **layout), cluster(node(gpus=4)))
    ranks = layout.get("data", 1) * layout["tensor"]
    assert reasons(plan) == {"megatron": f"needs {ranks} GPUs, the cluster has 4 (nearest layouts that fit: {nearest})"}
