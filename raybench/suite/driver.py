"""Schedules the tracks of a suite one after the other, shares its budget out, and survives what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raybench.errors import RequestError
from raybench.results.folder import StoreError
from raybench.suite.means import Means
from raybench.suite.plan import TrackPlan
from raybench.suite.resume import Recorded
from raybench.suite.rows import RowMaker
from raybench.suite.track_run import TrackRun
from raybench.wording import count


@dataclass
class Outcome:
    """How a suite ended."""

    statuses: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of every case, by track and case."""
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers should know, such as rounds that the budget cut."""
    interrupted: bool = False
    named: set[tuple[str, str]] = field(default_factory=set)
    """Cases that were asked for one by one."""

    @property
    def exit_code(self) -> int:
        """0 done, 1 something failed, was asked for by name and skipped, or nothing could run, 130 interrupted."""
        if self.interrupted:
            return 130
        statuses = set(self.statuses.values())
        named = {self.statuses.get(case) for case in self.named}
        bad = self.errors or statuses - {"ok", "skipped"} or "skipped" in named or "ok" not in statuses
        return 1 if bad else 0


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Runs planned tracks."""

    means: Means
    budget_s: float | None = None
    estimate_s: Callable[[TrackPlan], float] = lambda plan: float(len(plan.runnable))
    """Seconds that a track may take: only its ratio to other tracks' is used, to share the budget out."""
    recorded: Recorded | None = None
    """What the suite has already."""

    def run(self, tracks: Sequence[tuple[TrackPlan, RowMaker]]) -> Outcome:
        """Run all tracks. Rows of what could not run are written too; Ctrl-C keeps what is there."""
        outcome = Outcome(named={(p.track.track, case) for p, _ in tracks for case in p.named})
        begun_s = time.time()
        runs = [self._track_run(plan, rows) for plan, rows in tracks]
        for run in runs:
            self.means.progress.expect(run.name, run.rounds_left())
        try:
            for index, run in enumerate(runs):
                if any(earlier.broke for earlier in runs[:index]):
                    run.plan_again()
                run.deadline_unix_s = self._deadline(begun_s, runs[index:])
                self._announce(run)
                run.run()
        except KeyboardInterrupt:
            outcome.interrupted = True
            outcome.errors.append("interrupted")
            self.means.progress.note("interrupted: rows so far are kept")
            self._abandon(runs, "interrupted", outcome)
        except StoreError as error:
            outcome.errors.append(str(error))
        except RequestError as error:
            outcome.errors.append(str(error))
            self._abandon(runs, str(error), outcome)
        for run in runs:
            for name, state in run.states.items():
                if state.cut:
                    outcome.notes.append(f"{run.name}:{name}: {state.describe_cut()}")
                unfinished = state.status == "ok" and bool(state.left)
                outcome.statuses[run.name, name] = "skipped" if unfinished else state.status
        return outcome

    def _track_run(self, plan: TrackPlan, rows: RowMaker) -> TrackRun:
        run = TrackRun(plan, rows, self.means)
        if self.recorded is not None:
            self.recorded.restore(run)
        return run

    def _deadline(self, begun_s: float, runs: Sequence[TrackRun]) -> float | None:
        """When the first of `runs` must be done, so that each gets its share of what is left of the budget."""
        if self.budget_s is None:
            return None
        now = time.time()
        left = begun_s + self.budget_s - now
        shares = [self.estimate_s(run.plan) if run.rounds_left() else 0.0 for run in runs]
        return now + max(0.0, left) * shares[0] / (sum(shares) or 1.0)

    def _announce(self, run: TrackRun) -> None:
        plan = run.plan
        if plan.placement is None or not run.rounds_left():
            return
        nodes = count(len(plan.placement.nodes), "node")
        where = f"{count(plan.placement.num_ranks, 'rank')} on {nodes}, {plan.backend}"
        shared = ", ranks share cores" if plan.shares_cores else ""
        self.means.progress.track_begun(run.name, plan.track.title, where + shared)

    def _abandon(self, runs: Sequence[TrackRun], reason: str, outcome: Outcome) -> None:
        try:
            for run in runs:
                run.abandon(reason)
        except StoreError as error:
            outcome.errors.append(str(error))
