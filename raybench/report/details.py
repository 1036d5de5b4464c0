"""What the sections of a report show beside their table, gathered once for all tracks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from raybench.analysis.bubble import round_operations, schedule_of, simulation
from raybench.analysis.communication import communication, stragglers
from raybench.analysis.convergence import convergence
from raybench.analysis.timeline import Timeline, timeline
from raybench.parallel.pipeline.simulate import Timeline as Simulated
from raybench.results.reader import in_threads

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey


@dataclass(frozen=True)
class Details:
    """Of one track in one suite, or of all of them."""

    communication: pd.DataFrame
    late: pd.DataFrame
    """Rows of `stragglers`."""
    losses: pd.DataFrame
    timelines: dict[tuple[str, str, str], Timeline]
    simulated: dict[tuple[str, str, str], Simulated]
    """Of pipelines: the step that the schedule allows with the measured times of its actions."""
    placements: dict[tuple[str, str, str], pd.DataFrame]
    """Where each case's ranks were, in the order of its mesh: rank, node."""

    def of(self, suite_id: str, track: str) -> Details:
        def part(frame: pd.DataFrame) -> pd.DataFrame:
            return frame[(frame.suite_id == suite_id) & (frame.track == track)]

        return Details(
            part(self.communication),
            part(self.late),
            part(self.losses),
            {key: value for key, value in self.timelines.items() if key[:2] == (suite_id, track)},
            {key: value for key, value in self.simulated.items() if key[:2] == (suite_id, track)},
            {key: value for key, value in self.placements.items() if key[:2] == (suite_id, track)},
        )


def gather(results: Results) -> Details:
    """Everything of every track; of measured cases alone."""
    runs = results.runs
    measured: dict[tuple[str, str, str], RoundKey] = {}
    for key, ok in zip(results.rounds, (runs.status == "ok") & (runs.gate != "failed"), strict=True):
        if ok and (key[:3] not in measured or key[3] > measured[key[:3]][3]):
            measured[key[:3]] = key
    keys = list(measured.values())
    measured_steps = in_threads(lambda key: timeline(results, key), keys)
    simulations = in_threads(lambda key: _simulation(results, key), keys)
    placements = in_threads(lambda key: _placement(results, key), keys)
    return Details(
        communication(results),
        stragglers(results),
        convergence(results),
        {key[:3]: found for key, found in zip(keys, measured_steps, strict=True) if found is not None},
        {key[:3]: found for key, found in zip(keys, simulations, strict=True) if found is not None},
        {key[:3]: found for key, found in zip(keys, placements, strict=True) if len(found)},
    )


def _simulation(results: Results, key: RoundKey) -> Simulated | None:
    run = results.runs.iloc[results.rounds.index(key)]
    schedule = schedule_of({str(name): value for name, value in run.items()})
    return None if schedule is None else simulation(schedule, round_operations(results, key))


def _placement(results: Results, key: RoundKey) -> pd.DataFrame:
    """The case's ranks in the order of its mesh, which is contiguous within nodes."""
    piece = results.piece("ranks", key, ["rank", "node", "node_rank"])
    if piece is None:
        return pd.DataFrame(columns=["rank", "node"])
    frame: pd.DataFrame = piece.to_pandas()
    return frame.sort_values(["node_rank", "rank"], na_position="last")[["rank", "node"]].reset_index(drop=True)
