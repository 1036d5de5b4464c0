"""The simulation, against times worked out by hand, closed forms, and what a wrong schedule costs."""

from __future__ import annotations

import pytest

from raybench.parallel.pipeline.actions import SENDS, Action, Schedule
from raybench.parallel.pipeline.check import find_faults
from raybench.parallel.pipeline.schedules import build, gpipe
from raybench.parallel.pipeline.simulate import Event, MeasuredTimes, Timeline, Times, simulate
from raybench.parallel.pipeline.transfers import with_transfers


def ends(timeline, rank):
    return {str(event.action): event.end for event in timeline.events[rank]}


def test_a_warm_up_that_is_one_forward_short_costs_half_the_throughput():
    """p = 3, m = 8: idle 20 % of the step as published, and 53 % one forward short."""
    num_ranks, num_micro_batches = 3, 8
    orders = []
    for rank in range(num_ranks):
        num_warmup = max(0, num_ranks - rank - 2)
        order = [f"{rank}F{k}" for k in range(num_warmup)]
        for k in range(num_micro_batches):
            if num_warmup + k < num_micro_batches:
                order.append(f"{rank}F{num_warmup + k}")
            order.append(f"{rank}B{k}")
        orders.append([Action.parse(text) for text in order])
    short = with_transfers("short", orders, placement=(0, 1, 2), num_micro_batches=num_micro_batches)
    assert find_faults(short) == []  # it is correct, and slow: only the simulation tells
    right = simulate(build("one-f-one-b", stages=num_ranks, micro_batches=num_micro_batches))
    assert right.bubble == pytest.approx(0.20)
    assert simulate(short).bubble == pytest.approx(0.53, abs=0.005)


def test_a_transfer_is_paid_once_a_hop():
    schedule = build("gpipe", stages=3, micro_batches=1)
    timeline = simulate(schedule, Times(forward=2.0, input_gradient=3.0, weight_gradient=4.0, transfer=0.5))
    assert timeline.step_time == 3 * (2 + 3 + 4) + 4 * 0.5
    assert [str(transfer.action) for transfer in timeline.transfers] == ["0SEND_F0", "1SEND_F0", "2SEND_B0", "1SEND_B0"]
    assert [(transfer.begin, transfer.end) for transfer in timeline.transfers][:2] == [(2.0, 2.5), (4.5, 5.0)]
    assert timeline.waited(0) == timeline.step_time - timeline.busy(0)
    assert timeline.waited(2) == 5.0
    assert timeline.busy(2) == 9.0


class Launching(Times):
    """A send keeps its rank for a quarter of a second."""

    def launch(self, action):
        return 0.25 if action.kind in SENDS else 0.0


def test_launching_a_transfer_keeps_its_rank_from_the_next_action():
    timeline = simulate(build("gpipe", stages=2, micro_batches=2), Launching(transfer=0.5))
    assert ends(timeline, 0)["0F0"] == 1.0
    assert ends(timeline, 0)["0F1"] == 2.25
    assert ends(timeline, 1)["1F0"] == 2.5  # the transfer is under way meanwhile
    assert ends(timeline, 1)["1F1"] == 3.75


def test_times_may_differ_from_stage_to_stage():
    times = Times(forward=(1.0, 5.0), input_gradient=1.0, weight_gradient=(0.0, 2.0), transfer=(0.25, 0.5))
    timeline = simulate(build("gpipe", stages=2, micro_batches=2), times)
    assert ends(timeline, 0) == {"0F0": 1.0, "0F1": 2.0, "0B0": 15.75, "0B1": 18.75}
    assert ends(timeline, 1) == {"1F0": 6.25, "1F1": 11.25, "1B0": 14.25, "1B1": 17.25}


def test_messages_of_one_channel_follow_each_other():
    timeline = simulate(build("gpipe", stages=2, micro_batches=3), Times(transfer=4.0))
    forwards = [(t.begin, t.end) for t in timeline.transfers if str(t.action).startswith("0SEND_F")]
    assert forwards == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0)]


def test_a_receive_that_is_posted_late_holds_its_message_back():
    def plan(rank_1):
        actions = [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            rank_1,
        ]
        parsed = tuple(tuple(Action.parse(text) for text in rank.split()) for rank in actions)
        return Schedule("by hand", 2, 2, 2, (0, 1), parsed)

    early = plan("1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1")
    late = plan("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
    times = Times(transfer=0.5)
    assert ends(simulate(early, times), 1)["1F1"] == 5.5
    assert ends(simulate(late, times), 1)["1F1"] == 6.0


def test_receives_are_posted_early_enough_to_hide_transfers_in_gpipe():
    """Only the first message of the fill and the drain of each hop is seen: 2 (p - 1) transfers, at any m."""
    for micro_batches in (1, 4, 16):
        exposed = simulate(build("gpipe", stages=4, micro_batches=micro_batches), Times(transfer=0.25)).step_time
        assert exposed == 3 * (micro_batches + 3) + 6 * 0.25


def test_lead_says_how_early_a_receive_is_posted():
    orders = gpipe(2, 6)
    first_receive = {}
    for lead in (0, 1, 3):
        schedule = with_transfers("gpipe", orders, placement=(0, 1), num_micro_batches=6, lead=lead)
        assert find_faults(schedule) == []
        texts = [str(action) for action in schedule.actions[0]]
        first_receive[lead] = texts[texts.index("0RECV_B0") :].index("0B0")
        computed = [text for text in texts[: texts.index("0RECV_B0")] if text.startswith("0F")]
        assert len(computed) == 6 - max(0, lead)
    assert first_receive[0] < first_receive[3]


def test_measured_times_are_taken_action_by_action():
    schedule = build("one-f-one-b", stages=2, micro_batches=2)
    seconds = {action: 0.1 for rank in range(2) for action in schedule.actions[rank]}
    seconds[Action.parse("0F0")] = 1.0
    seconds[Action.parse("0SEND_F0")] = 0.5
    timeline = simulate(schedule, MeasuredTimes(seconds))
    assert ends(timeline, 0)["0F0"] == 1.0
    assert ends(timeline, 1)["1F0"] == pytest.approx(1.6)


def test_a_measured_timeline_need_not_begin_at_zero():
    def event(text, begin, end):
        return Event(Action.parse(text), begin, end)

    timeline = Timeline("measured", ((event("0F0", 5.0, 6.0), event("0B0", 8.0, 9.0)), (event("1F0", 6.0, 8.0),)))
    assert timeline.step_time == 4.0
    assert timeline.bubble == pytest.approx(0.5)


def test_only_what_takes_time_has_a_duration():
    times = Times(forward=1.0, input_gradient=2.0, weight_gradient=3.0, transfer=4.0)
    durations = {text: times.duration(Action.parse(text)) for text in ("0F0", "0I0", "0W0", "0B0", "0SEND_B0")}
    assert durations == {"0F0": 1.0, "0I0": 2.0, "0W0": 3.0, "0B0": 5.0, "0SEND_B0": 4.0}
    with pytest.raises(ValueError, match="ask for its send"):
        times.duration(Action.parse("0RECV_B0"))
