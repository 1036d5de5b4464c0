"""The bubble of a pipeline, told three ways: in theory, simulated from its measured actions, and measured.

The instrumented steps hold, for every rank, when each action began and ended and how long each receive stood still.
From these come the measured timeline, and the times that the schedule's simulation needs: what simulation and
measurement differ by is what the runner adds to the schedule.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from raybench.parallel.pipeline.actions import COMPUTE, SENDS, Action, Kind, Schedule
from raybench.parallel.pipeline.plan import TWINS, num_micro_batches
from raybench.parallel.pipeline.schedules import SCHEDULES, build
from raybench.parallel.pipeline.simulate import Event, MeasuredTimes, Timeline, simulate
from raybench.parallel.pipeline.theory import theory_bubble

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey

COLUMNS = ("rank", "step", "kind", "label", "axis", "begin_ns", "end_ns", "wait_ns", "exposed_ns", "launch_ns")
ACTIONS = ("forward", "backward", "input_gradient", "weight_gradient")
STOOD_STILL_NS = 50_000
"""A receive that was waited for longer than this had not arrived before: its end is that of the transfer."""


@dataclass(frozen=True)
class Bubble:
    """Idle fractions of the step, over all ranks and from the first action's begin to the last one's end."""

    theory: float | None
    """None for a peer's schedule that has no hand-written twin."""
    simulated: float | None = None
    measured: float | None = None
    simulated_step_s: float | None = None
    measured_step_s: float | None = None
    """Like what was simulated, the mean of the instrumented steps."""


def schedule_of(run: Mapping[str, Any]) -> Schedule | None:
    """The schedule of a row of `runs`, a peer's being its twin's; None where there is none that is known here."""
    name = run.get("pipeline_strategy")
    if not isinstance(name, str) or TWINS.get(name, name) not in SCHEDULES:
        return None
    environment = run.get("environment")
    options = json.loads(environment).get("options", {}) if isinstance(environment, str) else {}
    return build(
        TWINS.get(name, name),
        stages=int(run["pipeline_size"]),
        micro_batches=num_micro_batches(options, int(run["num_micro_batches"])),
        chunks=options.get("num_chunks"),
    )


def bubble_of(schedule: Schedule, operations: pd.DataFrame, *, strategy: str | None = None) -> Bubble:
    """The bubble of one round.

    Args:
        operations: rows of all ranks of the round with `COLUMNS`, times on one clock; may hold no actions.
        strategy: the peer, if it is one.
    """
    theory = None if strategy == "torch-interleaved-zero-bubble" else theory_bubble(schedule)
    actions = _actions(operations)
    if actions.empty:
        return Bubble(theory)
    measured = [_timeline(schedule, step) for _, step in actions.groupby("step")]
    steps = (operations[operations.step == step] for step in actions.step.unique())
    simulated = [simulate(schedule, measured_times(schedule, step)) for step in steps]
    return Bubble(
        theory=theory,
        simulated=fmean(timeline.bubble for timeline in simulated),
        measured=fmean(timeline.bubble for timeline in measured),
        simulated_step_s=fmean(timeline.step_time for timeline in simulated),
        measured_step_s=fmean(timeline.step_time for timeline in measured),
    )


def measured_times(schedule: Schedule, operations: pd.DataFrame) -> MeasuredTimes:
    """Seconds of every action and transfer: medians over the steps given, and over replicas.

    A transfer takes from the moment that both ends have begun to its arrival, which is seen only where the receiver
    stood still; one that always arrived unseen is given the median of those seen.
    """
    actions = _actions(operations)
    took = (actions.end_ns - actions.begin_ns) / 1e9
    seconds = {Action.parse(str(label)): float(value) for label, value in took.groupby(actions.label).median().items()}
    moved: dict[Action, list[float]] = defaultdict(list)
    bounds: list[float] = []
    receives = operations[operations.kind == "receive"]
    columns = (receives[name].astype("float64") for name in ("begin_ns", "end_ns", "wait_ns", "exposed_ns"))
    for label, begin, end, wait, exposed in zip(receives.label, *columns, strict=True):
        moving = (end - begin - (0.0 if np.isnan(wait) else wait)) / 1e9
        bounds.append(moving)
        if exposed > STOOD_STILL_NS:
            moved[_send(str(label))].append(moving)
    seen = [value for values in moved.values() for value in values]
    typical = median(seen) if seen else min(bounds, default=0.0)
    for sends in schedule.actions:
        for send in sends:
            if send.kind in SENDS:
                seconds[send] = median(moved[send]) if moved[send] else typical
    return MeasuredTimes(seconds, _launches(operations))


def _launches(operations: pd.DataFrame) -> dict[Action, float]:
    """Medians of the seconds for which a send or a receive kept its rank when it began."""
    found: dict[Action, float] = {}
    for kind in ("send", "receive"):
        own = operations[(operations.kind == kind) & operations.launch_ns.notna()]
        for label, launch_ns in own.groupby("label").launch_ns.median().items():
            send = _send(str(label))
            found[send if kind == "send" else send.matching_receive()] = float(launch_ns) / 1e9
    return found


def simulation(schedule: Schedule, operations: pd.DataFrame) -> Timeline | None:
    """The step that the schedule allows with the measured times of its actions; None where none were recorded."""
    if _actions(operations).empty:
        return None
    return simulate(schedule, measured_times(schedule, operations))


def bubble(results: Results) -> pd.DataFrame:
    """One row a case with a pipeline: suite_id, track, case, and the fields of `Bubble`, medians over rounds."""
    found: dict[tuple[str, ...], list[Bubble]] = defaultdict(list)
    runs = results.runs.to_dict("records")
    for key, run in zip(results.rounds, runs, strict=True):
        schedule = schedule_of({str(name): value for name, value in run.items()})
        if schedule is not None and run["status"] == "ok":
            found[key[:3]].append(
                bubble_of(schedule, round_operations(results, key), strategy=str(run["pipeline_strategy"]))
            )
    names = list(Bubble.__dataclass_fields__)
    rows = []
    for case, bubbles in found.items():
        known = {name: [v for b in bubbles if (v := getattr(b, name)) is not None] for name in names}
        rows.append((*case, *(median(known[name]) if known[name] else np.nan for name in names)))
    return pd.DataFrame(rows, columns=["suite_id", "track", "case", *names])


def round_operations(results: Results, key: RoundKey) -> pd.DataFrame:
    """The operations of one round, times on the first rank's clock."""
    piece = results.piece("operations", key, COLUMNS)
    ranks = results.piece("ranks", key, ("rank", "clock_offset_ns"))
    if piece is None or not piece.num_rows:
        return pd.DataFrame(columns=list(COLUMNS))
    operations: pd.DataFrame = piece.to_pandas()
    if ranks is not None:
        offsets = ranks.to_pandas().set_index("rank").clock_offset_ns.fillna(0)
        shift = operations["rank"].map(offsets).fillna(0)
        operations["begin_ns"], operations["end_ns"] = operations.begin_ns + shift, operations.end_ns + shift
    return operations


def _actions(operations: pd.DataFrame) -> pd.DataFrame:
    """The actions among the spans of the ranks' own work."""
    return operations[operations.kind.isin(ACTIONS) & operations.label.notna() & operations.axis.isna()]


def _timeline(schedule: Schedule, actions: pd.DataFrame) -> Timeline:
    """One step as it was; a row of events a rank."""
    origin = int(actions.begin_ns.min())
    events = []
    for _, of_rank in actions.sort_values("begin_ns").groupby("rank"):
        now = 0.0
        row = []
        for label, begin_ns, end_ns in zip(of_rank.label, of_rank.begin_ns, of_rank.end_ns, strict=True):
            begin, end = (int(begin_ns) - origin) / 1e9, (int(end_ns) - origin) / 1e9
            row.append(Event(Action.parse(str(label)), begin, end, waited=begin - now))
            now = end
        events.append(tuple(row))
    return Timeline(schedule.name, tuple(events))


def _send(made_by: str) -> Action:
    """The send that passes on the output of this action, as both ends of a transfer are labelled."""
    action = Action.parse(made_by)
    assert action.kind in COMPUTE
    kind = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
    return Action(kind, action.stage, action.micro_batch)
