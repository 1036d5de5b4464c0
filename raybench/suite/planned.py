"""What `--dry-run` prints: the plan as text, or as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raybench.suite.estimate import GPU_FLOPS_PER_S, Estimate, estimate_track, measure_core_flops_per_s
from raybench.suite.listing import describe_case
from raybench.suite.plan import TrackPlan
from raybench.suite.resume import Recorded
from raybench.suite.session import Prepared
from raybench.wording import count


@dataclass(frozen=True)
class PlannedTrack:
    """What of a track would run, and roughly what it takes."""

    plan: TrackPlan
    estimate: Estimate
    """Of the whole track, whatever of it is done."""
    reasons: dict[str, str]
    """Why cases do not run."""
    rounds: dict[str, int]
    """Rounds that each case has still to run."""

    @property
    def seconds(self) -> float:
        """The estimate's share of what is left."""
        most = self.plan.track.measure.num_rounds * len(self.plan.runnable)
        return self.estimate.seconds * sum(self.rounds.values()) / most if most else 0.0


def plan_tracks(prepared: Prepared, recorded: Recorded | None) -> list[PlannedTrack]:
    """Every track beside what the suite to go on with has of it, by this machine's speed where CPUs compute."""
    on_cpu = any(plan.backend == "gloo" and plan.runnable for plan in prepared.plans)
    speed = {"core_flops_per_s": measure_core_flops_per_s()} if on_cpu else {}
    tracks = []
    for plan in prepared.plans:
        reasons = {case.name: reason for case, reason in plan.skipped}
        whole, name = plan.track.measure.num_rounds, plan.track.track
        runnable = [case.name for case in plan.runnable]
        rounds = dict.fromkeys(runnable, whole)
        if recorded is not None:
            rounds = {case: recorded.num_left(name, case, whole) for case in runnable}
            done = [case for case, left in rounds.items() if not left]
            reasons.update({case: f"{recorded.bad_end(name, case) or 'done'} in this suite" for case in done})
        tracks.append(PlannedTrack(plan, estimate_track(plan, **speed), reasons, rounds))
    return tracks


def planned_rows(tracks: Sequence[PlannedTrack]) -> list[dict[str, Any]]:
    """One object a case: whether it would run, where, and roughly how much it takes."""
    rows = []
    for planned in tracks:
        plan = planned.plan
        for case in plan.track.cases:
            runs = case.name not in planned.reasons
            place = plan.placement if runs else None
            rows.append(
                {
                    **describe_case(plan.track.track, case),
                    "runs": runs,
                    "reason": planned.reasons.get(case.name),
                    "rounds": planned.rounds.get(case.name, 0),
                    "backend": plan.backend if runs else None,
                    "num_nodes": place.num_nodes(case.layout.num_ranks) if place else None,
                    "ranks_share_cores": plan.shares_cores if runs else None,
                    "estimated_bytes_per_rank": planned.estimate.case_bytes[case.name],
                }
            )
    return rows


def plan_text(prepared: Prepared, tracks: Sequence[PlannedTrack], notes: Sequence[str]) -> str:
    """The dry run for a person."""
    lines = [f"cluster: {prepared.cluster.describe()}", f"scale: {prepared.scale}", *prepared.notes, *notes]
    on_gpu = any(plan.backend == "nccl" for plan in prepared.plans)
    for planned in tracks:
        plan = planned.plan
        lines.append(f"{plan.track.track}: {plan.track.title}")
        if plan.placement is not None and planned.seconds:
            nodes = ", ".join(f"{n.num_ranks} on {n.address}" for n in plan.placement.nodes)
            shared = "; ranks share cores" if plan.shares_cores else ""
            lines.append(f"  ranks: {nodes}; {plan.backend}{shared}; about {_duration(planned.seconds)}")
        for case in plan.track.cases:
            if case.name in planned.reasons:
                lines.append(f"  {case.name:<24} not run: {planned.reasons[case.name]}")
                continue
            size = planned.estimate.case_bytes[case.name]
            memory = "memory not estimated" if size is None else f"about {size / 2**30:.2f} GiB a rank"
            rounds = count(planned.rounds[case.name], "round")
            lines.append(f"  {case.name:<24} {case.layout}, {rounds}, {memory}")
    basis = f"an assumed {GPU_FLOPS_PER_S / 1e12:g} TFLOP/s a GPU" if on_gpu else "one core's measured speed"
    total = _duration(sum(planned.seconds for planned in tracks))
    lines.append(f"all: about {total} (estimated from FLOPs and {basis}, not promised)")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
