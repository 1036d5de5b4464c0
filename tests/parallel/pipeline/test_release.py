"""A sent tensor is let go only once it has arrived, whatever the times of the actions."""

from __future__ import annotations

import random

import pytest

from raybench.parallel.pipeline.actions import SENDS
from raybench.parallel.pipeline.release import releases
from raybench.parallel.pipeline.schedules import SCHEDULES, build
from raybench.parallel.pipeline.simulate import MeasuredTimes, simulate


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_let_go_has_arrived(name, stages, micro_batches):
    schedule = build(name, stages=stages, micro_batches=micro_batches)
    draw = random.Random(f"{name}{stages}{micro_batches}")
    times = MeasuredTimes({a: draw.uniform(0.01, 5.0) for actions in schedule.actions for a in actions})
    timeline = simulate(schedule, times)
    begin = {event.action: event.begin for events in timeline.events for event in events}
    arrived = {transfer.action: transfer.end for transfer in timeline.transfers}
    for rank in range(stages):
        for action, sends in releases(schedule, rank).items():
            for send in sends:
                assert arrived[send] <= begin[action]


@pytest.mark.parametrize("name", ["one-f-one-b", "interleaved", "zero-bubble"])
def test_activations_are_let_go_while_the_step_goes_on(name):
    """At any moment no more sent tensors are held than the plan has micro-batches on their way."""
    schedule = build(name, stages=4, micro_batches=16)
    for rank in range(4):
        released = releases(schedule, rank)
        held = most = 0
        for action in schedule.actions[rank]:
            held += (action.kind in SENDS) - len(released.get(action, ()))
            most = max(most, held)
        assert most <= 4 * schedule.num_chunks * 2 + 2, f"rank {rank} holds {most}"
