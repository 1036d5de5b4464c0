"""Every schedule, for every size: runs, is as short as its paper says, and holds as many activations as it may."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.errors import RequestError
from raybench.parallel.pipeline.actions import Action, Kind
from raybench.parallel.pipeline.check import find_faults, peak_activations, peak_receives
from raybench.parallel.pipeline.schedules import MAX_FORWARDS, SCHEDULES, build, fill_gaps
from raybench.parallel.pipeline.simulate import Times, simulate
from raybench.parallel.pipeline.theory import theory_bubble

FAST = settings(deadline=None, derandomize=True)
STAGES = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 20)


def printed(schedule, rank):
    return " ".join(str(action) for action in schedule.compute(rank))


@settings(FAST, max_examples=1_000)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=st.sampled_from([-1, 0, *range(1, 7)]),
    micro_batches=st.sampled_from([-1, 0, *range(1, 11)]),
    chunks=st.sampled_from([None] * 8 + [-1, 0, 1, 2, 3, 4]),
)
def test_any_request_runs_or_is_refused_with_a_reason(name, stages, micro_batches, chunks):
    wrong = {
        "stages": stages < 1,
        "micro-batches": micro_batches < 1,
        "chunks": chunks is not None and chunks not in SCHEDULES[name].chunks,
    }
    if any(wrong.values()):
        with pytest.raises(RequestError) as refusal:
            build(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
        field, _, reason = str(refusal.value).partition(": ")
        assert wrong[field]
        assert "the least is 1" in reason or "nearest that does is" in reason
        return
    schedule = build(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    assert find_faults(schedule) == []
    assert schedule.num_ranks == stages
    assert schedule.num_chunks == (chunks or SCHEDULES[name].chunks[0])
    num_backwards = sum(action.kind is not Kind.FORWARD for rank in range(stages) for action in schedule.compute(rank))
    split = name.startswith("zero-bubble")
    assert num_backwards == schedule.num_stages * micro_batches * (2 if split else 1)


def test_the_nearest_size_that_a_refusal_names_is_accepted():
    with pytest.raises(RequestError, match="nearest that works is 3125"):
        build("zero-bubble-v", stages=16, micro_batches=MAX_FORWARDS)
    assert MAX_FORWARDS == 16 * 2 * 3125
    with pytest.raises(RequestError, match=rf"stages: 1000000 is too many.*nearest that works is {MAX_FORWARDS}$"):
        build("gpipe", stages=1_000_000, micro_batches=1)
    with pytest.raises(RequestError, match=r"schedule: 'interleave' is not known; did you mean 'interleaved'\?"):
        build("interleave", stages=2, micro_batches=2)
    with pytest.raises(
        RequestError, match=r"chunks: 1 does not work for interleaved.*nearest that does is 2; one-f-one-b"
    ):
        build("interleaved", stages=2, micro_batches=2, chunks=1)


def test_one_forward_one_backward_is_the_published_order():
    schedule = build("one-f-one-b", stages=3, micro_batches=4)
    assert printed(schedule, 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert printed(schedule, 1) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    assert printed(schedule, 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"


def test_zero_bubble_is_the_published_order():
    schedule = build("zero-bubble", stages=3, micro_batches=4)
    assert printed(schedule, 0) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert printed(schedule, 1) == "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3"
    assert printed(schedule, 2) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"


def test_two_ranks_with_four_stages_interleave_and_finish():
    schedule = build("interleaved", stages=2, micro_batches=2)
    assert schedule.placement == (0, 1, 0, 1)
    assert printed(schedule, 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert printed(schedule, 1) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    simulate(schedule)


def test_the_v_is_folded_and_hands_over_within_a_rank():
    schedule = build("zero-bubble-v", stages=4, micro_batches=8)
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.stages_of(0) == (0, 7)
    last = [str(action) for action in schedule.actions[3]]
    assert "3F0" in last
    assert "4F0" in last
    assert not {"3SEND_F0", "4RECV_F0", "4SEND_B0", "3RECV_B0"} & set(last)
    assert {"3RECV_F0", "4SEND_F0", "4RECV_B0", "3SEND_B0"} <= set(last)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7, 8, 13])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_activations_in_flight_are_what_each_paper_allows(stages, micro_batches):
    def peak(name):
        return peak_activations(build(name, stages=stages, micro_batches=micro_batches))

    p, m, ranks = stages, micro_batches, range(stages)
    assert peak("naive") == tuple(1 for _ in ranks)
    assert peak("gpipe") == tuple(m for _ in ranks)
    assert peak("one-f-one-b") == tuple(min(m, p - rank) for rank in ranks)
    assert peak("zero-bubble") == tuple(min(m, p) for _ in ranks)
    assert max(peak("zero-bubble-v")) == min(2 * m, 2 * p)
    largest_group = m if m < p else p + -(-(m % p) // (m // p))
    assert peak("interleaved") == tuple(min(2 * m, largest_group + 2 * (p - rank - 1) + 1) for rank in ranks)


# In units of one stage's forward, each of F, I and W taking one: what the whole step takes.
STEPS = {
    "naive": lambda p, m: 3 * p * m,
    "gpipe": lambda p, m: 3 * (m + p - 1),
    "one-f-one-b": lambda p, m: 3 * (m + p - 1),
    "interleaved": lambda p, m: 3 * (2 * m + p - 1 + max(0, p - m)),
    "zero-bubble": lambda p, m: 3 * m + 2 * (p - 1) - (min(m, p) - 1),
    # The second matters between p / 2 and p micro-batches, the third below.
    "zero-bubble-v": lambda p, m: max(6 * m + p - 1, 4 * m + 3 * p - 1, 2 * m + 4 * p - 1),
}


@settings(FAST, max_examples=100)
@given(name=st.sampled_from(sorted(SCHEDULES)), stages=STAGES, micro_batches=MICRO_BATCHES)
def test_the_step_is_the_closed_form_and_its_bubble_the_theory(name, stages, micro_batches):
    schedule = build(name, stages=stages, micro_batches=micro_batches)
    timeline = simulate(schedule)
    assert timeline.step_time == STEPS[name](stages, micro_batches)
    if name == "zero-bubble-v" and stages / 2 < micro_batches < stages:
        assert theory_bubble(schedule) <= timeline.bubble
    else:
        assert timeline.bubble == pytest.approx(theory_bubble(schedule), abs=1e-12)


@settings(FAST, max_examples=100)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    stages=STAGES,
    micro_batches=MICRO_BATCHES,
    times=st.tuples(*[st.sampled_from([0.5, 0.8, 1.0, 1.3, 2.0])] * 3),
)
def test_no_times_beat_the_theory(name, stages, micro_batches, times):
    forward, input_gradient, weight_gradient = times
    parts = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
    schedule = build(name, stages=stages, micro_batches=micro_batches)
    simulated, theory = simulate(schedule, Times(**parts)).bubble, theory_bubble(schedule, **parts)
    assert simulated >= theory - 1e-12
    if not name.startswith("zero-bubble"):
        assert simulated == pytest.approx(theory, abs=1e-12)


def test_long_weight_gradients_do_not_let_the_last_rank_begin_earlier():
    schedule = build("zero-bubble", stages=4, micro_batches=8)
    busy, late_start = 8 * (1 + 1 + 3), 3 * 1
    assert theory_bubble(schedule, weight_gradient=3.0) == pytest.approx(late_start / (busy + late_start))
    assert simulate(schedule, Times(weight_gradient=3.0)).bubble >= late_start / (busy + late_start)


@pytest.mark.parametrize(
    ("name", "step_s", "bubble"),
    [
        ("naive", 1.920, 3 / 4),
        ("gpipe", 0.660, 3 / 11),
        ("one-f-one-b", 0.660, 3 / 11),
        ("interleaved", 0.570, 3 / 19),
        ("zero-bubble", 0.540, 1 / 9),
        ("zero-bubble-v", 0.510, 1 / 17),
    ],
)
def test_four_stages_of_twenty_milliseconds(name, step_s, bubble):
    schedule = build(name, stages=4, micro_batches=8)
    part = 0.020 / schedule.num_chunks
    timeline = simulate(schedule, Times(forward=part, input_gradient=part, weight_gradient=part))
    assert timeline.step_time == pytest.approx(step_s, abs=1e-9)
    assert timeline.bubble == pytest.approx(bubble, abs=1e-9)
    assert theory_bubble(schedule, forward=part, input_gradient=part, weight_gradient=part) == pytest.approx(bubble)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 8), (8, 32)])
def test_receive_buffers_stay_few(stages, micro_batches):
    for name in SCHEDULES:
        most = max(peak_receives(build(name, stages=stages, micro_batches=micro_batches)))
        assert 1 <= most <= stages + 3, name


def test_weight_gradients_that_cannot_be_placed_are_an_error():
    critical = [[Action.parse(text) for text in ("0F0", "0F1", "0I0", "0I1")]]
    assert [str(action) for action in fill_gaps(critical, num_stages=1, capacity=2)[0]][-2:] == ["0W0", "0W1"]
    with pytest.raises(ValueError, match="1 activations in flight are too few"):
        fill_gaps(critical, num_stages=1, capacity=1)


@pytest.mark.parametrize("text", ["2F0", "1I3", "0W12", "10B7", "0SEND_F2", "3RECV_B1"])
def test_actions_print_and_parse(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 ", "-1F0", "2send_f0"])
def test_what_is_not_an_action_is_refused(text):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)
