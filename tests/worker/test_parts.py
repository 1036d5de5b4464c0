"""Mesh, clock, memory, cores and rendezvous, each alone."""

from __future__ import annotations

import gc
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raybench.parallel.norm import global_norm
from raybench.suite.ranks import num_crossing, placement
from raybench.suite.track import Layout, OptimizerConfig
from raybench.worker import clock
from raybench.worker.build import learning_rate_factor
from raybench.worker.clock import StepClock
from raybench.worker.cores import share_of
from raybench.worker.memory import ActivationMeter, peak_rss_bytes, reset_peaks
from raybench.worker.mesh import axis_ranks
from raybench.worker.rendezvous import Rendezvous
from tests.pool import Rank

CPU = torch.device("cpu")


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), st.integers(1, 8))
def test_placement_uses_the_fewest_nodes(nodes, wanted):
    wanted = min(wanted, len(nodes))
    ranks = placement(nodes, wanted)
    assert len(set(ranks)) == wanted
    sizes = sorted((nodes.count(n) for n in set(nodes)), reverse=True)
    fewest = next(k for k in range(1, len(sizes) + 1) if sum(sizes[:k]) >= wanted)
    assert len({nodes[r] for r in ranks}) == fewest
    for node in set(nodes):
        places = [i for i, r in enumerate(ranks) if nodes[r] == node]
        assert places == list(range(places[0], places[-1] + 1)) if places else True
    assert placement(nodes, len(nodes))[:wanted] == ranks


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 6))
def test_tensor_groups_stay_inside_nodes_where_they_can(nodes, tensor, num_groups):
    num_ranks = tensor * min(num_groups, len(nodes) // tensor)
    if not num_ranks:
        return
    ranks = placement(nodes, num_ranks, tensor=tensor)
    assert len(set(ranks)) == num_ranks
    assert {nodes[r] for r in ranks} <= {nodes[r] for r in placement(nodes, num_ranks)}  # no more nodes for it
    assert nodes[ranks[0]] == nodes[placement(nodes, 1)[0]] or tensor > nodes.count(nodes[placement(nodes, 1)[0]])
    used = {nodes[r] for r in placement(nodes, num_ranks)}
    whole = sum(nodes.count(node) // tensor for node in used)
    assert num_crossing(nodes, Layout(data=num_ranks // tensor, tensor=tensor)) == max(0, num_ranks // tensor - whole)


def test_a_tensor_group_is_not_split_where_a_node_has_an_odd_rank():
    nodes = ["a", "a", "a", "b", "b", "b"]
    assert placement(nodes, 4, tensor=2) == (0, 1, 3, 4)
    assert placement(nodes, 6, tensor=2) == (0, 1, 3, 4, 2, 5)
    assert num_crossing(nodes, Layout(data=3, tensor=2)) == 1
    assert num_crossing(nodes, Layout(tensor=6)) == 1


def test_tensor_is_innermost_and_every_rank_is_on_one_group_of_each_axis():
    layout = Layout(data=2, pipeline=3, tensor=2)
    ranks = list(range(100, 112))
    first = axis_ranks(layout, ranks, 0)
    assert first["tensor"] == (100, 101)
    assert first["pipeline"] == (100, 102, 104)
    assert first["data"] == (100, 106)
    for axis, size in (("data", 2), ("pipeline", 3), ("tensor", 2)):
        groups = {axis_ranks(layout, ranks, place)[axis] for place in range(12)}
        assert sorted(r for g in groups for r in g) == ranks
        assert {len(g) for g in groups} == {size}


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "shares"),
    [(2, 2, [[0], [1]]), (4, 2, [[0, 1], [2, 3]]), (2, 4, [[0], [1], [0], [1]]), (5, 2, [[0, 1], [2, 3]])],
)
def test_cores_are_shared_out(num_cores, num_ranks, shares):
    assert [share_of(list(range(num_cores)), i, num_ranks) for i in range(num_ranks)] == shares


def test_the_clock_synchronises_at_both_ends_of_a_window_and_nowhere_between(monkeypatch):
    """Without the last one early pipeline stages look ten times faster than they are."""
    calls: list[str] = []
    monkeypatch.setattr(clock, "synchronize", lambda device: calls.append("synchronize"))
    steps = StepClock(CPU, 3)
    steps.start()
    for _ in range(3):
        calls.append("step")
        steps.step_ended()
    steps.stop()
    assert calls == ["synchronize", "step", "step", "step", "synchronize"]


def test_step_times_add_up():
    steps = StepClock(CPU, 3)
    steps.start()
    for duration in (0.01, 0.02, 0.03):
        time.sleep(duration)
        steps.step_ended()
    total = steps.stop()
    times = steps.steps()
    assert [d >= t * 1e9 for (_, d), t in zip(times, (0.01, 0.02, 0.03), strict=True)] == [True] * 3
    assert sum(d for _, d in times) <= total
    assert [begin for begin, _ in times[1:]] == [b + d for b, d in times[:-1]]
    assert abs(times[0][0] - time.time_ns()) < 60e9


def test_activations_are_counted_once_and_until_they_are_freed():
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    with ActivationMeter([weight]) as meter:
        hidden = x @ weight  # keeps x: 4 * 8 * 4 bytes, and weight, which does not count
        activated = torch.tanh(hidden)  # keeps its result
        loss = (activated * activated).sum()  # keeps its result, which is counted already
        del hidden, activated
        assert meter.live_bytes == 2 * 4 * 8 * 4
        loss.backward()
        del loss
        gc.collect()
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 2 * 4 * 8 * 4


def test_the_resident_peak_can_begin_anew():
    before = peak_rss_bytes()
    block = torch.ones(64 * 2**20 // 4)
    raised = peak_rss_bytes()
    assert raised >= before
    del block
    gc.collect()
    reset_peaks(CPU)
    assert peak_rss_bytes() <= raised - 32 * 2**20


@pytest.mark.parametrize("sizes", [[1], [1023], [1024], [1025], [5, 3000, 1], [2_000_000]])
def test_norm_is_right_for_any_size(sizes):
    tensors = [torch.randn(n) for n in sizes]
    expected = float(torch.cat(tensors).double().norm())
    assert float(global_norm(tensors)) == pytest.approx(expected, rel=1e-6)
    assert float(global_norm([torch.full((3,), 2.0, dtype=torch.bfloat16)])) == pytest.approx(12**0.5)


def test_norm_of_many_small_rows_after_large_ones(monkeypatch):
    """As in a model of 360 million parameters: each small square is lost in an fp32 sum that large ones began."""
    monkeypatch.setattr("raybench.parallel.norm.ROW", 4)
    large, small = torch.full((64 * 4,), 0.5), torch.full((400_000 * 4,), 1e-4)
    expected = math.sqrt(64 + 400_000 * 4 * float(small[0]) ** 2)
    assert float(global_norm([large, small])) == pytest.approx(expected, rel=1e-6)


def test_learning_rate_schedules():
    linear = OptimizerConfig(schedule="linear", warmup_steps=4, schedule_steps=14)
    assert [round(learning_rate_factor(linear, s), 3) for s in (0, 3, 4, 9, 14, 99)] == [0.2, 0.8, 1, 0.5, 0, 0]
    cosine = OptimizerConfig(schedule="cosine", schedule_steps=10)
    assert [round(learning_rate_factor(cosine, s), 3) for s in (0, 5, 10)] == [1, 0.5, 0]
    assert learning_rate_factor(OptimizerConfig(), 10**6) == 1


def late_meeting(rank: Rank) -> tuple[list[str], float, float]:
    """What was heard, when the last rank came to the last meeting (on that rank), and when this one left it."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    store = PrefixStore(f"meeting-{rank.world_size}", _get_default_store())
    meetings = Rendezvous(store, rank.recorder.marks, timeout_s=30)
    mesh = rank.mesh(Layout(data=rank.world_size))
    heard, last_came = [], 0.0
    for number in range(2):
        if rank.rank == 1:
            time.sleep(0.3)
            last_came = time.monotonic()
            meetings.announce(f"word {number}", f"hello {number}")
        meetings.meet(mesh.all, "here")
        left = time.monotonic()
        heard.append(meetings.listen(f"word {number}"))
    return heard, last_came, left


def test_everybody_waits_for_the_last_and_hears_what_was_said(pools):
    results = pools(3).run(late_meeting)
    last_came = results[1][1]  # ranks of one host share this clock
    for heard, _, left in results:
        assert heard == ["hello 0", "hello 1"]
        assert left >= last_came > 0
