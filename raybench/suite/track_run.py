"""One track, from its first job to its last row.

A case that breaks its job gets its row and is never tried again; what is left goes on in a new job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from raybench.results.schema import Status
from raybench.suite.attempt import Attempt, Blame, Place, Round
from raybench.suite.capture import capture
from raybench.suite.case_state import CaseState
from raybench.suite.job import Job, RoundKey
from raybench.suite.job_run import Broken, JobRun, one_line
from raybench.suite.means import Means
from raybench.suite.plan import TrackPlan
from raybench.suite.rows import BATCH_COLUMNS, RowMaker, rank_row
from raybench.worker.messages import CaseRefused, Hello, RankFailed, RoundBegun, Row


class TrackRun:
    """Runs one planned track. Rows are in the store as soon as a round is complete."""

    def __init__(self, plan: TrackPlan, rows: RowMaker, means: Means) -> None:
        self.plan = plan
        self.rows = rows
        self.means = means
        self.attempt = 0
        """The last attempt."""
        self.deadline_unix_s: float | None = None
        self.broke = False
        """Whether some job of it did not end well."""
        self.states = {
            case.name: CaseState(case, plan.round_numbers(verify_only=means.verify_only)) for case in plan.track.cases
        }
        self._hellos: Mapping[int, Hello] = {}

    @property
    def name(self) -> str:
        return self.plan.track.track

    def rounds_left(self) -> list[RoundKey]:
        """Rounds to do, alternating over the cases."""
        left = [(number, name) for name, state in self.states.items() for number in state.left]
        return [RoundKey(case=name, round=number) for number, name in sorted(left, key=lambda item: item[0])]

    def run(self) -> None:
        """Do all rounds, in as many jobs as it takes; every case has a row afterwards."""
        self._skip_unfit()
        self._keep_apart()
        while rounds := self.rounds_left():
            done_before = self._num_done()
            broken = self._run_job(rounds)
            if broken is None:
                self._end_unfinished()
                return
            self.broke = True
            state = self.states.get(broken.blame.case or "")
            if state is None or broken.blame.round not in state.left:
                if self._num_done() == done_before:
                    self._give_up(broken)
                    return
                self.means.progress.note(f"{self.name}: {broken.blame.reason}; going on in a new job")
            else:
                self._offend(state, broken)
            self.plan_again()

    def plan_again(self) -> None:
        """After a job broke: the nodes that are left may not do for all that is left."""
        if self.rounds_left():
            self.plan = self.means.replan(self.plan)
            self.rows = replace(self.rows, plan=self.plan)
            self._skip_unfit()
            self._keep_apart()

    def _keep_apart(self) -> None:
        """All rounds of a case are on equally many nodes: where there are fewer or more now, it keeps what it has."""
        for name, state in self.states.items():
            if self.plan.placement is None or state.num_nodes is None or not (left := state.left):
                continue
            if (now := self.plan.placement.num_nodes(state.case.layout.num_ranks)) != state.num_nodes:
                self._cut(name, len(left), f"whose nodes were {state.num_nodes} and would now be {now}")

    def _cut(self, name: str, num_rounds: int, why: str) -> None:
        state = self.states[name]
        state.cut = why
        self.means.progress.drop(self.name, name, num_rounds)
        self.means.progress.note(f"{self.name}:{name}: {state.describe_cut()}")

    def abandon(self, reason: str) -> None:
        """Give every case that is not done its row, skipped for `reason`."""
        for state in self.states.values():
            if state.left:
                self._end_case(state, "skipped", reason, attempt=0, round=0)

    def _num_done(self) -> int:
        return sum(len(state.done) + (state.status != "ok") for state in self.states.values())

    def _skip_unfit(self) -> None:
        for case, reason in self.plan.skipped:
            state = self.states[case.name]
            if state.left:
                self._end_case(state, "skipped", reason, attempt=0, round=0)

    def _run_job(self, rounds: Sequence[RoundKey]) -> Broken | None:
        placement = self.plan.placement
        if placement is None:
            raise AssertionError("rounds are left that have no place")
        self.attempt += 1
        job_run = JobRun(
            world_size=placement.num_ranks,
            round_timeout_s=self.plan.track.measure.timeout_s,
            patience=self.means.patience,
            on_begin=self._on_begin,
            on_complete=lambda complete: self._complete(complete, job_run.attempt),
            on_refused=lambda refused: self._refuse(refused, job_run.attempt),
        )
        broken = job_run.run(
            partial(self._job, rounds, placement.num_ranks),
            placement,
            launcher=self.means.launcher,
            make_sink=self.means.make_sink,
        )
        self._last = job_run.attempt
        return broken

    def _job(self, rounds: Sequence[RoundKey], world_size: int, address: tuple[str, int], key: str) -> Job:
        wanted = {round_key.case for round_key in rounds}
        cases = tuple(case for case in self.plan.track.cases if case.name in wanted)
        return Job(
            suite_id=self.rows.suite_id,
            attempt=self.attempt,
            track=self.plan.track.model_copy(update={"cases": cases}),
            rounds=tuple(rounds),
            gate_passed={name: state.gate for name, state in self.states.items() if name in wanted and state.gate},
            micro_batch_sizes={
                name: state.batch["micro_batch_size"]
                for name, state in self.states.items()
                if name in wanted and state.batch
            },
            verify_only=self.means.verify_only,
            trace_steps=self.means.trace_steps,
            with_nsys=self.means.with_nsys,
            backend=self.plan.backend,
            world_size=world_size,
            deadline_unix_s=self.deadline_unix_s,
            sink_address=address,
            sink_key=key,
            environment=dict(self.rows.nccl_env),
        )

    def _on_begin(self, begun: RoundBegun) -> None:
        self.means.progress.round_begun(self.name, begun.case, begun.round)

    def _complete(self, complete: Round, attempt: Attempt) -> None:
        state = self.states[complete.case]
        if complete.round not in state.left:
            return
        parts = [complete.parts[rank] for rank in sorted(complete.parts)]
        measured = next((dict(part.run) for part in parts if part.run is not None), {})
        if measured.get("gate") == "passed":
            state.gate = {key: value for key, value in measured.items() if key.startswith("gate")}
        if "micro_batch_size" in measured:
            state.batch = {column: measured[column] for column in BATCH_COLUMNS}
        place = (complete.case, complete.round)
        run = self.rows.run(
            state.case,
            round=complete.round,
            attempt=self.attempt,
            status="ok",
            measured=measured,
            hellos=_hellos(attempt, complete.parts),
            started_at=attempt.begun_at.get(place),
        )
        tables = {
            "runs": [run],
            "ranks": [{**rank_row(part.rank, attempt.hellos), **part.ranks} for part in parts],
            "steps": [{"rank": part.rank, **row} for part in parts for row in part.steps],
            "evaluations": [row for part in parts for row in part.evaluations],
            "operations": [{"rank": part.rank, **row} for part in parts for row in part.operations],
        }
        try:
            self.means.store.write_round(self.name, complete.case, self.attempt, complete.round, tables)
        except ValueError as error:
            reason = f"its rows cannot be stored: {one_line(error)}"
            self._end_case(state, "failed", reason, attempt=self.attempt, round=complete.round)
            return
        for part in parts:
            if part.trace is not None:
                self.means.store.write_trace(self.name, complete.case, part.rank, part.trace)
        state.done.add(complete.round)
        if self.plan.placement is not None:
            state.num_nodes = self.plan.placement.num_nodes(state.case.layout.num_ranks)
        window_ns, tokens = measured.get("window_ns"), measured.get("tokens")
        speed = tokens / window_ns * 1e9 if window_ns and tokens else None
        self.means.progress.round_ended(self.name, complete.case, complete.round, speed, str(run["gate"]))

    def _refuse(self, refused: CaseRefused, attempt: Attempt) -> None:
        place = (refused.case, refused.round)
        self._end_case(
            self.states[refused.case],
            refused.status,
            refused.reason,
            attempt=self.attempt,
            round=refused.round,
            measured=refused.run,
            hellos=_hellos(attempt, attempt.members.get(place, ())),
            started_at=attempt.begun_at.get(place),
        )

    def _offend(self, state: CaseState, broken: Broken) -> None:
        """The row of the case that broke its job, with what each of its ranks did last."""
        attempt, blame = self._last, broken.blame
        place: Place = (str(blame.case), blame.round or 0)
        members = attempt.members.get(place, set())
        ranks = []
        for rank in sorted(members):
            fault = attempt.faults.get(rank)
            operation = broken.last_operations.get(rank) if fault is None else fault.last_operation
            stack = fault.stack if isinstance(fault, RankFailed) else None
            ranks.append({**rank_row(rank, attempt.hellos), "last_operation": operation, "stack": stack})
        reason = self._capture(place, members, blame) if blame.status == "timeout" else blame.reason
        self._end_case(
            state,
            blame.status,
            reason,
            attempt=self.attempt,
            round=place[1],
            hellos=_hellos(attempt, members),
            ranks=ranks,
            started_at=attempt.begun_at.get(place),
        )

    def _capture(self, place: Place, members: Collection[int], blame: Blame) -> str:
        """Keep what the ranks of a round that hung told; returns who did not come to what, and where it is kept."""
        found = capture(self._last, members)
        if found is None:
            return blame.reason
        folder = self.means.store.write_hang(self.name, *place, self.attempt, found.files)
        return f"{found.sentence or blame.reason} (captured in {folder})"

    def _end_case(
        self,
        state: CaseState,
        status: Status,
        reason: str,
        *,
        attempt: int,
        round: int,
        measured: Mapping[str, Any] | None = None,
        hellos: Mapping[int, Hello] | None = None,
        ranks: Sequence[Row] = (),
        started_at: datetime | None = None,
    ) -> None:
        """A case gets a row of another status than ok, and no more rounds."""
        state.status, state.reason = status, reason
        run = self.rows.run(
            state.case,
            round=round,
            attempt=attempt,
            status=status,
            reason=reason,
            measured={**(state.gate or {}), **state.batch, **(measured or {})},
            hellos=hellos,
            started_at=started_at,
        )
        tables: dict[str, Sequence[Row]] = {"runs": [run], "ranks": ranks}
        self.means.store.write_round(self.name, state.case.name, attempt, round, tables)
        self.means.progress.case_ended(self.name, state.case.name, status, reason)

    def _end_unfinished(self) -> None:
        """What a job that ended well has not done was cut by the budget, or is a fault."""
        for name, state in self.states.items():
            if not (left := state.left):
                continue
            if self.deadline_unix_s is not None and state.done:
                self._cut(name, len(left), "the budget is used up")
            else:
                reason = f"its job ended before round {left[0]}"
                self._end_case(state, "failed", reason, attempt=self.attempt, round=left[0])

    def _give_up(self, broken: Broken) -> None:
        """A job that broke before it did anything would break again: all that is left gets its reason."""
        for state in self.states.values():
            if left := state.left:
                blame = broken.blame
                self._end_case(state, blame.status, blame.reason, attempt=self.attempt, round=left[0])


def _hellos(attempt: Attempt, ranks: Collection[int]) -> dict[int, Hello]:
    return {rank: attempt.hellos[rank] for rank in sorted(ranks) if rank in attempt.hellos}
