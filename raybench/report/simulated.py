"""A pipeline's step as its schedule would run it, from the measured times of its own actions."""

from __future__ import annotations

from raybench.analysis.timeline import Timeline
from raybench.errors import RequestError
from raybench.parallel.pipeline.actions import COMPUTE, SENDS, Action, Kind, Schedule
from raybench.parallel.pipeline.schedules import build
from raybench.parallel.pipeline.simulate import simulate
from raybench.report.charts import Row, Stretch

SERIES = {Kind.FORWARD: "forward", Kind.WEIGHT_GRADIENT: "weight"}


class _Measured:
    """Times of actions as one step had them; transfers take none, so that all idle time is the schedule's."""

    def __init__(self, seconds: dict[Action, float]) -> None:
        self.seconds = seconds

    def duration(self, action: Action) -> float:
        return 0.0 if action.kind in SENDS else self.seconds[action]


def simulated(measured: Timeline, strategy: str, num_ranks: int) -> tuple[Row, ...] | None:
    """A row a rank; None where the spans are no actions of a schedule that is known by the strategy's name."""
    seconds = _actions(measured)
    if not seconds:
        return None
    num_stages = 1 + max(action.stage for action in seconds)
    num_micro_batches = 1 + max(action.micro_batch for action in seconds)
    try:
        schedule = build(strategy, stages=num_ranks, micro_batches=num_micro_batches, chunks=num_stages // num_ranks)
    except RequestError:
        return None
    if any(action not in seconds for action in _computed(schedule)):
        return None
    found = simulate(schedule, _Measured(seconds))
    return tuple(
        Row(
            f"rank {rank}",
            tuple(
                Stretch(SERIES.get(event.action.kind, "backward"), event.begin, event.end, str(event.action))
                for event in events
            ),
        )
        for rank, events in enumerate(found.events)
    )


def _actions(measured: Timeline) -> dict[Action, float]:
    """Seconds by action, of the spans whose label is one, such as 2F0."""
    found: dict[Action, float] = {}
    for lane in measured.lanes:
        for block in lane.work:
            try:
                found[Action.parse(block.label)] = block.end_s - block.begin_s
            except ValueError:
                continue
    return found


def _computed(schedule: Schedule) -> list[Action]:
    return [action for actions in schedule.actions for action in actions if action.kind in COMPUTE]
