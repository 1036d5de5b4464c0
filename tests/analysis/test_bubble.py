"""The bubble three ways, from rows as ranks write them."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

from raybench.analysis.bubble import COLUMNS, bubble_of, measured_times, schedule_of, simulation
from raybench.parallel.pipeline.actions import SENDS, Kind
from raybench.parallel.pipeline.schedules import build
from raybench.parallel.pipeline.simulate import Times, simulate

KINDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT_GRADIENT: "input_gradient"}
TIMES = Times(forward=0.020, input_gradient=0.022, weight_gradient=0.017, transfer=0.001)


def rows_of(schedule, times=TIMES, *, step=0, first_rank=0, late_s=0.0):
    """What ranks would have recorded of a step that went as simulated; the last gradient is `late_s` late."""
    timeline = simulate(schedule, times)
    origin = 1_700_000_000_000_000_000 + step * 10**10
    rows = []
    for rank, events in enumerate(timeline.events):
        for event in events:
            kind = KINDS.get(event.action.kind, "weight_gradient")
            late = late_s if event is events[-1] else 0.0
            span = (origin + int((event.begin + late) * 1e9), origin + int((event.end + late) * 1e9))
            rows.append((first_rank + rank, step, kind, str(event.action), None, *span, None, None, None))
    begin_of = {event.action: event.begin for events in timeline.events for event in events}
    for transfer in timeline.transfers:
        receive = transfer.action.matching_receive()
        user = next(a for a in schedule.compute(schedule.placement[receive.stage]) if schedule.input_of(a) == receive)
        kind = Kind.FORWARD if transfer.action.kind is Kind.SEND_ACTIVATION else Kind.BACKWARD
        label = f"{transfer.action.stage}{kind}{transfer.action.micro_batch}"
        stood_still = begin_of[user] - transfer.end < 1e-9
        end = transfer.end if stood_still else begin_of[user]
        exposed = 500_000 if stood_still else 5_000
        posted = transfer.begin - 0.002
        span = (origin + int(posted * 1e9), origin + int(end * 1e9))
        for name, action, seen in (("send", transfer.action, (0, 0)), ("receive", receive, (2_000_000, exposed))):
            rank, launch_ns = first_rank + schedule.placement[action.stage], int(times.launch(action) * 1e9)
            rows.append((rank, step, name, label, "pipeline", *span, *seen, launch_ns))
    return pd.DataFrame(rows, columns=list(COLUMNS))


@pytest.mark.parametrize("name", ["gpipe", "one-f-one-b", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_a_step_that_went_as_simulated_has_the_simulated_bubble(name):
    schedule = build(name, stages=4, micro_batches=6)
    operations = pd.concat([rows_of(schedule), rows_of(schedule, step=1), rows_of(schedule, first_rank=4)])
    expected = simulate(schedule, TIMES)
    found = bubble_of(schedule, operations)
    assert found.measured == pytest.approx(expected.bubble, abs=1e-5)
    assert found.simulated == pytest.approx(expected.bubble, abs=1e-5)
    assert found.measured_step_s == pytest.approx(expected.step_time, abs=1e-6)
    assert found.simulated_step_s == pytest.approx(expected.step_time, abs=1e-5)
    times = measured_times(schedule, operations)
    for actions in schedule.actions:
        for action in actions:
            if action.kind in (*KINDS, Kind.WEIGHT_GRADIENT) or action.kind in SENDS:
                assert times.duration(action) == pytest.approx(TIMES.duration(action), abs=1e-6)


class Launching(Times):
    """Times with launches that keep their rank."""

    def launch(self, action):
        return 0.004 if action.kind in SENDS else 0.001


@pytest.mark.parametrize("name", ["one-f-one-b", "interleaved", "zero-bubble-v"])
def test_what_launching_transfers_takes_is_simulated(name):
    schedule, times = build(name, stages=4, micro_batches=6), Launching(**dataclasses.asdict(TIMES))
    expected = simulate(schedule, times)
    found = bubble_of(schedule, rows_of(schedule, times))
    assert found.simulated == pytest.approx(found.measured, abs=1e-4)
    assert found.simulated_step_s == pytest.approx(expected.step_time, abs=1e-4)
    assert found.simulated_step_s > simulate(schedule, TIMES).step_time + 0.020
    unknown = rows_of(schedule, times).assign(launch_ns=None)  # as in stores of before it was measured
    assert bubble_of(schedule, unknown).simulated < found.simulated - 0.01


def test_what_the_runner_loses_is_in_the_measured_bubble_alone():
    schedule = build("one-f-one-b", stages=2, micro_batches=4)
    found = bubble_of(schedule, rows_of(schedule, late_s=0.010))
    plain = bubble_of(schedule, rows_of(schedule))
    assert found.simulated == pytest.approx(plain.simulated)
    assert found.measured_step_s == pytest.approx(plain.measured_step_s + 0.010)
    assert found.measured > plain.measured + 0.02


def test_a_peer_has_its_theory_alone():
    schedule = build("one-f-one-b", stages=4, micro_batches=4)
    empty = pd.DataFrame(columns=list(COLUMNS))
    found = bubble_of(schedule, empty, strategy="torch-1f1b")
    assert found.theory == pytest.approx(3 / 7)
    assert found.simulated is None
    assert simulation(schedule, empty) is None
    assert found.measured is None
    assert bubble_of(schedule, empty, strategy="torch-interleaved-zero-bubble").theory is None


def test_the_schedule_of_a_row():
    row = {"pipeline_strategy": "torch-interleaved", "pipeline_size": 2, "num_micro_batches": 4}
    options = json.dumps({"options": {"num_chunks": 3, "num_micro_batches": 8}})
    schedule = schedule_of({**row, "environment": options})
    assert (schedule.name, schedule.num_chunks, schedule.num_micro_batches) == ("interleaved", 3, 8)
    assert schedule_of({"pipeline_strategy": None}) is None
