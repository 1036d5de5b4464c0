"""The checker finds each planted fault, and says where it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raybench.parallel.pipeline.actions import Action, Schedule, ScheduleError
from raybench.parallel.pipeline.check import Fault, check, find_deadlock, find_faults
from raybench.parallel.pipeline.schedules import SCHEDULES, build
from raybench.parallel.pipeline.simulate import simulate
from raybench.parallel.pipeline.transfers import with_transfers


def parse(*ranks):
    return tuple(tuple(Action.parse(text) for text in rank.split()) for rank in ranks)


def written(*ranks, micro_batches, placement=None):
    """A schedule written out by hand, one string a rank."""
    placement = placement or tuple(range(len(ranks)))
    return Schedule("by hand", len(ranks), len(placement), micro_batches, placement, parse(*ranks))


def edit(schedule, rank, change):
    """The schedule with one rank's list of printed actions changed."""
    texts = [str(action) for action in schedule.actions[rank]]
    change(texts)
    actions = list(schedule.actions)
    actions[rank] = parse(" ".join(texts))[0]
    return replace(schedule, actions=tuple(actions))


def swap(first, second):
    def change(texts):
        i, j = texts.index(first), texts.index(second)
        texts[i], texts[j] = texts[j], texts[i]

    return change


@pytest.fixture
def one_f_one_b():
    schedule = build("one-f-one-b", stages=3, micro_batches=4)
    check(schedule)
    return schedule


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, lambda texts: texts.remove("1RECV_F2"), "rank 1: 1F2 has no 1RECV_F2 to take its input from"),
        (1, lambda texts: texts.remove("1RECV_B0"), "rank 1: 1B0 has no 1RECV_B0 to take its input from"),
        (0, lambda texts: texts.remove("0SEND_F1"), "rank 0: 0F1 has no 0SEND_F1 to pass its output on"),
        (2, lambda texts: texts.remove("2SEND_B3"), "rank 2: 2B3 has no 2SEND_B3 to pass its output on"),
        (1, lambda texts: texts.remove("1F3"), "rank 1: 1F3 is missing"),
        (1, lambda texts: texts.remove("1B3"), "rank 1: 1B3 is missing"),
        (1, lambda texts: texts.append("1B3"), "rank 1: 1B3 is there twice"),
        (1, lambda texts: texts.append("1I3"), "rank 1: 1B3 is there both whole and split"),
        (1, lambda texts: texts.append("1SEND_F0"), "rank 1: 1SEND_F0 is there twice"),
        (2, lambda texts: texts.append("2SEND_F0"), "rank 2: 2SEND_F0 has no other end on another rank"),
        (0, lambda texts: texts.insert(0, "0RECV_F0"), "rank 0: 0RECV_F0 has no other end on another rank"),
        (0, lambda texts: texts.append("1F0"), "rank 0: 1F0 is here, but its stage is on rank 1"),
        (0, lambda texts: texts.append("0F4"), "rank 0: 0F4 is of a micro-batch that does not exist"),
        (0, lambda texts: texts.append("3F0"), "rank 0: 3F0 is of a stage that does not exist"),
        (0, swap("0F0", "0B0"), "rank 0: 0B0 comes before 0F0"),
        (1, swap("1RECV_F3", "1F3"), "rank 1: 1RECV_F3 comes after 1F3, which needs it"),
        (1, swap("1SEND_F3", "1F3"), "rank 1: 1SEND_F3 comes before 1F3, which makes it"),
        (1, swap("1RECV_F1", "1RECV_F0"), "rank 1: message 0 from rank 0 is received as 1RECV_F1, but was sent for"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(one_f_one_b, rank, change, message):
    broken = edit(one_f_one_b, rank, change)
    with pytest.raises(ScheduleError) as error:
        check(broken)
    assert str(error.value).startswith(f"one-f-one-b cannot run: {message}")


def test_a_fault_points_at_its_action(one_f_one_b):
    broken = edit(one_f_one_b, 1, lambda texts: texts.remove("1RECV_F2"))
    [fault] = find_faults(broken)
    assert fault.rank == 1
    assert str(broken.actions[1][fault.index]) == "1F2"


def test_a_weight_gradient_before_its_input_gradient_is_found():
    broken = edit(build("zero-bubble", stages=2, micro_batches=2), 0, swap("0I1", "0W1"))
    assert [fault.message for fault in find_faults(broken)] == ["0W1 comes before 0I1"]


def test_neighbours_that_both_send_first_are_found():
    """Each waits in its send for the other to post the receive that comes after the other's own send."""
    schedule = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        micro_batches=2,
    )
    assert find_deadlock(schedule, sends_block=False) == []
    assert find_faults(schedule) == [
        Fault(0, 3, "0SEND_F1 waits for ever for 1RECV_F1 to be posted"),
        Fault(1, 3, "1SEND_B0 waits for ever for 0RECV_B0 to be posted"),
    ]
    posted_earlier = edit(schedule, 1, lambda texts: texts.insert(1, texts.pop(texts.index("1RECV_F1"))))
    assert find_faults(posted_earlier) == []


@pytest.mark.parametrize("lead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_blocking_sends_never_deadlock_however_late_receives_may_be(name, lead):
    """Receives just before their use would: a send waits for one that stands behind the neighbour's own send."""
    schedule = build(name, stages=3, micro_batches=7)
    orders = [schedule.compute(rank) for rank in range(3)]
    again = with_transfers(name, orders, placement=schedule.placement, num_micro_batches=7, lead=lead)
    assert find_faults(again) == []


def test_messages_used_out_of_order_are_received_in_the_order_of_sending():
    orders = parse("0F0 0F1 0F2 0B0 0B2 0B1", "1F0 1B0 1F2 1B2 1F1 1B1")
    schedule = with_transfers("by hand", orders, placement=(0, 1), num_micro_batches=3)
    assert find_faults(schedule) == []
    received = [str(action) for action in schedule.actions[1] if str(action).startswith("1RECV_F")]
    assert received == ["1RECV_F0", "1RECV_F1", "1RECV_F2"]


def test_ranks_that_compute_in_orders_that_wait_for_each_other_are_found():
    schedule = written(
        "0RECV_B0 0F0 0SEND_F0 0B0 0RECV_B1 0F1 0SEND_F1 0B1",
        "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0",
        micro_batches=2,
    )
    # Both channels disagree about the order as well: what is found first is reported.
    assert "message 0 from rank 1 is received as 0RECV_B0" in find_faults(schedule)[0].message
    assert [fault.message for fault in find_deadlock(schedule, sends_block=False)] == [
        "0B0 waits for ever for 1SEND_B0",
        "1F1 waits for ever for 0SEND_F1",
    ]
    with pytest.raises(ScheduleError, match="rank 0 at 0B0, rank 1 at 1F1"):
        simulate(schedule)
    with pytest.raises(ScheduleError, match="rank 0 at 0B0, rank 1 at 1F1"):
        with_transfers("by hand", parse("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), placement=(0, 1), num_micro_batches=2)


def test_a_hop_within_a_rank_has_an_order_too():
    schedule = written("0F0 1F0 1B0 0B0", micro_batches=1, placement=(0, 0))
    assert find_faults(schedule) == []
    backward_first = written("0F0 1F0 0B0 1B0", micro_batches=1, placement=(0, 0))
    assert find_faults(backward_first) == [Fault(0, 2, "0B0 waits for ever for 1B0")]
    forward_late = written("1F0 0F0 1B0 0B0", micro_batches=1, placement=(0, 0))
    assert find_faults(forward_late) == [Fault(0, 0, "1F0 waits for ever for 0F0")]


def test_a_transfer_within_a_rank_is_found():
    schedule = edit(build("zero-bubble-v", stages=2, micro_batches=1), 1, lambda texts: texts.append("1SEND_F0"))
    assert [fault.message for fault in find_faults(schedule)] == ["1SEND_F0 has no other end on another rank"]


def test_a_plan_without_all_its_ranks_is_found(one_f_one_b):
    broken = replace(one_f_one_b, actions=one_f_one_b.actions[:2])
    assert [fault.message for fault in find_faults(broken)] == [
        "the plan does not list every rank and place every stage"
    ]


def test_only_a_send_has_a_receive_and_the_other_way_round():
    assert str(Action.parse("1SEND_B2").matching_receive()) == "0RECV_B2"
    assert str(Action.parse("0RECV_B2").matching_send()) == "1SEND_B2"
    for text in ("0RECV_B2", "0F0"):
        with pytest.raises(ValueError, match="is not a send"):
            Action.parse(text).matching_receive()
    with pytest.raises(ValueError, match="is not a receive"):
        Action.parse("1SEND_B2").matching_send()
