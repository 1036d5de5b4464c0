"""What `--dry-run` prints: the plan as text, or as rows."""

from __future__ import annotations

from typing import Any

from raybench.suite.estimate import estimate_track
from raybench.suite.listing import describe_case
from raybench.suite.session import Prepared


def planned_rows(prepared: Prepared) -> list[dict[str, Any]]:
    """One object a case: whether it would run, where, and roughly how much it takes."""
    rows = []
    for plan in prepared.plans:
        reasons = {case.name: reason for case, reason in plan.skipped}
        estimate = estimate_track(plan)
        for case in plan.track.cases:
            fits = case.name not in reasons
            place = plan.placement if fits else None
            rows.append(
                {
                    **describe_case(plan.track.track, case),
                    "runs": fits,
                    "reason": reasons.get(case.name),
                    "rounds": plan.track.measure.num_rounds if fits else 0,
                    "backend": plan.backend if fits else None,
                    "num_nodes": place.num_nodes(case.layout.num_ranks) if place else None,
                    "ranks_share_cores": plan.shares_cores if fits else None,
                    "estimated_bytes_per_rank": estimate.case_bytes[case.name],
                }
            )
    return rows


def plan_text(prepared: Prepared) -> str:
    """The dry run for a person."""
    lines = [f"cluster: {prepared.cluster.describe()}", f"scale: {prepared.scale}", *prepared.notes]
    total = 0.0
    for plan in prepared.plans:
        estimate = estimate_track(plan)
        total += estimate.seconds
        reasons = {case.name: reason for case, reason in plan.skipped}
        lines.append(f"{plan.track.track}: {plan.track.title}")
        if plan.placement is not None:
            nodes = ", ".join(f"{n.num_ranks} on {n.address}" for n in plan.placement.nodes)
            shared = "; ranks share cores" if plan.shares_cores else ""
            lines.append(f"  ranks: {nodes}; {plan.backend}{shared}; about {_duration(estimate.seconds)}")
        for case in plan.track.cases:
            if case.name in reasons:
                lines.append(f"  {case.name:<24} not run: {reasons[case.name]}")
                continue
            size = estimate.case_bytes[case.name]
            memory = "memory unknown (own model)" if size is None else f"about {size / 2**30:.2f} GiB a rank"
            rounds = plan.track.measure.num_rounds
            lines.append(f"  {case.name:<24} {case.layout}, {rounds} rounds, {memory}")
    lines.append(f"all: about {_duration(total)} (estimated from FLOPs and one core's measured speed, not promised)")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
