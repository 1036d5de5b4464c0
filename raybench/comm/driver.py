"""Runs a sweep: a job for each setting and round, and a row for every case whatever happens to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from raybench.comm.rows import rows_of
from raybench.comm.sweep import TRACK, CommJob, SweepCase
from raybench.results.folder import StoreError
from raybench.results.schema import Status
from raybench.suite.attempt import Round
from raybench.suite.job import RoundKey
from raybench.suite.job_run import Broken, JobRun, MakeSink, Patience
from raybench.suite.launch import Launcher
from raybench.suite.placement import NodePlacement
from raybench.suite.progress import Progress
from raybench.suite.track import Layout
from raybench.worker.messages import CaseRefused, RoundBegun, Row

LOOP = "raybench.comm.worker:run_job"


class Store(Protocol):
    """Keeps the rows of a case's round."""

    def write(self, track: str, case: str, attempt: int, round: int, rows: Sequence[Row]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is to be measured, and where."""

    suite_id: str
    cases: tuple[SweepCase, ...]
    sizes: tuple[int, ...]
    settings: Mapping[str, Mapping[str, str]]
    """Environment of the ranks by the setting's name; at least one."""
    layout: Layout | None
    num_rounds: int
    budget_s: float
    timeout_s: int
    overlap: bool
    backend: str
    placement: NodePlacement
    link_bytes_per_s: float | None = None
    """As it was given, for groups that cross nodes or, on one node, for all."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Of every row: versions and hardware."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Likewise, in the rows' JSON."""

    def jobs(self) -> list[tuple[str, tuple[int, ...]]]:
        """Settings and the rounds that one job does under each.

        One setting alone does all in one job; of several each has a job of its own in every round, the first in turn.
        """
        names = list(self.settings)
        if len(names) == 1:
            return [(names[0], tuple(range(1, self.num_rounds + 1)))]
        return [
            (names[(place + number) % len(names)], (number + 1,))
            for number in range(self.num_rounds)
            for place in range(len(names))
        ]

    def label(self, setting: str, case: str) -> str:
        """The column `case`: with the setting where several are compared."""
        return case if len(self.settings) == 1 else f"{setting}-{case}"


@dataclass
class Outcome:
    """How a sweep ended."""

    errors: list[str] = field(default_factory=list)
    num_measured: int = 0
    """Rounds of cases that were timed."""
    refused: list[str] = field(default_factory=list)
    """Cases that the backend does not have, each with the reason."""
    interrupted: bool = False


@dataclass
class SweepRun:
    """One sweep under way."""

    sweep: Sweep
    store: Store
    launcher: Launcher
    make_sink: MakeSink
    progress: Progress
    patience: Patience = field(default_factory=Patience)
    outcome: Outcome = field(default_factory=Outcome)
    _attempt: int = 0
    _begun_at: dict[tuple[str, int], datetime] = field(default_factory=dict)
    _dropped: dict[str, set[str]] = field(default_factory=dict)
    """Cases that are not asked for again, by setting."""
    _written: set[str] = field(default_factory=set)
    """Cases that have a row."""

    def run(self) -> Outcome:
        """Run all jobs. Ctrl-C and a full disk end it, and keep what is there."""
        jobs = self.sweep.jobs()
        for setting, numbers in jobs:
            keys = [RoundKey(case=self._label(setting, case), round=n) for case in self.sweep.cases for n in numbers]
            self.progress.expect(TRACK, keys)
        try:
            for setting, numbers in jobs:
                self._settle(setting, numbers, self.sweep.budget_s / self.sweep.num_rounds / len(self.sweep.settings))
        except KeyboardInterrupt:
            self.outcome.interrupted = True
            self.outcome.errors.append("interrupted")
            self.progress.note("interrupted: rows so far are kept")
            self._abandon()
        except StoreError as error:
            self.outcome.errors.append(str(error))
        return self.outcome

    def _abandon(self) -> None:
        """A row for every case that has none."""
        with suppress(StoreError):
            for setting in self.sweep.settings:
                for case in self.sweep.cases:
                    if self._label(setting, case) not in self._written:
                        self._write(
                            setting, case, 0, [{**case.model_dump(), "status": "skipped", "reason": "interrupted"}]
                        )

    def _label(self, setting: str, case: SweepCase) -> str:
        return self.sweep.label(setting, case.name)

    def _settle(self, setting: str, numbers: Sequence[int], budget_s: float) -> None:
        """Do some rounds under a setting, in as many jobs as it takes: whoever breaks one is left out of the next.

        `budget_s` is that of one round.
        """
        left = [RoundKey(case=case.name, round=number) for number in numbers for case in self.sweep.cases]
        total = len(left)
        while left := [key for key in left if key.case not in self._dropped.setdefault(setting, set())]:
            done: set[tuple[str, int]] = set()
            broken = self._job(setting, left, budget_s * len(numbers) * len(left) / total, done)
            left = [key for key in left if (key.case, key.round) not in done]
            if broken is None:
                return
            self._blame(setting, broken, left, made_progress=bool(done))

    def _job(
        self, setting: str, keys: Sequence[RoundKey], budget_s: float, done: set[tuple[str, int]]
    ) -> Broken | None:
        sweep = self.sweep
        self._attempt += 1
        wanted = {key.case for key in keys}
        cases = {case.name: case for case in sweep.cases if case.name in wanted}

        def make_job(address: tuple[str, int], key: str) -> CommJob:
            return CommJob(
                suite_id=sweep.suite_id,
                attempt=self._attempt,
                backend=sweep.backend,
                world_size=sweep.placement.num_ranks,
                sink_address=address,
                sink_key=key,
                environment=dict(sweep.settings[setting]),
                cases=tuple(cases.values()),
                rounds=tuple(keys),
                sizes=sweep.sizes,
                layout=sweep.layout,
                budget_s=budget_s,
                timeout_s=sweep.timeout_s,
                overlap=sweep.overlap,
            )

        def begun(message: RoundBegun) -> None:
            self._begun_at.setdefault((message.case, message.round), datetime.now(UTC))
            self.progress.round_begun(TRACK, sweep.label(setting, message.case), message.round)

        def completed(found: Round) -> None:
            done.add((found.case, found.round))
            self._complete(setting, cases[found.case], found)

        def refused(message: CaseRefused) -> None:
            self._end_case(setting, cases[message.case], message.round, message.status, message.reason)
            self.outcome.refused.append(f"{sweep.label(setting, message.case)}: {message.reason}")

        return JobRun(
            world_size=sweep.placement.num_ranks,
            round_timeout_s=sweep.timeout_s,
            patience=self.patience,
            on_begin=begun,
            on_complete=completed,
            on_refused=refused,
        ).run(make_job, sweep.placement, launcher=self.launcher, make_sink=self.make_sink)

    def _complete(self, setting: str, case: SweepCase, found: Round) -> None:
        first = found.parts[min(found.parts)].ranks
        crosses = first["num_nodes"] > 1 or len(self.sweep.placement.nodes) == 1
        rows = rows_of(
            case,
            found.parts,
            link_bytes_per_s=self.sweep.link_bytes_per_s if crosses else None,
        )
        self._write(setting, case, found.round, rows)
        self.outcome.num_measured += 1
        label = self._label(setting, case)
        wrong = [row for row in rows if row["status"] == "failed"]
        if wrong:
            self.outcome.errors.append(
                f"{label} round {found.round}: {wrong[0]['payload_bytes']} bytes: {wrong[0]['reason']}"
            )
        self.progress.round_ended(TRACK, label, found.round, None, "not_run")

    def _blame(self, setting: str, broken: Broken, left: Sequence[RoundKey], *, made_progress: bool) -> None:
        """A row for whoever broke the job; for all that is left where nobody did, or nothing came of it."""
        blame = broken.blame
        cases = {case.name: case for case in self.sweep.cases}
        if blame.case is not None:
            self._end_case(setting, cases[blame.case], blame.round or 0, blame.status, blame.reason)
            self.outcome.errors.append(f"{self.sweep.label(setting, blame.case)}: {blame.status}: {blame.reason}")
            return
        if made_progress:
            return
        self.outcome.errors.append(f"{setting}: {blame.status}: {blame.reason}")
        for name in dict.fromkeys(key.case for key in left):
            self._end_case(setting, cases[name], 0, blame.status, blame.reason)

    def _end_case(self, setting: str, case: SweepCase, number: int, status: Status, reason: str) -> None:
        self._dropped.setdefault(setting, set()).add(case.name)
        self._write(setting, case, number, [{**case.model_dump(), "status": status, "reason": reason}])
        self.progress.case_ended(TRACK, self._label(setting, case), status, reason)

    def _write(self, setting: str, case: SweepCase, number: int, rows: Sequence[Row]) -> None:
        environment = {**self.sweep.environment, "nccl_env": dict(self.sweep.settings[setting])}
        common = {
            **self.sweep.columns,
            "setting": setting,
            "started_at": self._begun_at.pop((case.name, number), None) or datetime.now(UTC),
            "environment": json.dumps(environment, sort_keys=True, default=str),
        }
        whole = [{**common, **{name: value for name, value in row.items() if value is not None}} for row in rows]
        self.store.write(TRACK, self._label(setting, case), self._attempt, number, whole)
        self._written.add(self._label(setting, case))
