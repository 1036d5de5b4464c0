"""What `--dry-run` prints: the plan as text, or as rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raybench.suite.estimate import GPU_FLOPS_PER_S, Estimate, estimate_track, measure_core_flops_per_s
from raybench.suite.listing import describe_case
from raybench.suite.session import Prepared


def estimates(prepared: Prepared) -> dict[str, Estimate]:
    """What each track will roughly take, by this machine's speed where CPUs compute."""
    on_cpu = any(plan.backend == "gloo" and plan.runnable for plan in prepared.plans)
    speed = {"core_flops_per_s": measure_core_flops_per_s()} if on_cpu else {}
    return {plan.track.track: estimate_track(plan, **speed) for plan in prepared.plans}


def planned_rows(prepared: Prepared, estimated: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """One object a case: whether it would run, where, and roughly how much it takes."""
    rows = []
    for plan in prepared.plans:
        reasons = {case.name: reason for case, reason in plan.skipped}
        estimate = estimated[plan.track.track]
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


def plan_text(prepared: Prepared, estimated: Mapping[str, Estimate]) -> str:
    """The dry run for a person."""
    lines = [f"cluster: {prepared.cluster.describe()}", f"scale: {prepared.scale}", *prepared.notes]
    total = 0.0
    on_gpu = any(plan.backend == "nccl" for plan in prepared.plans)
    for plan in prepared.plans:
        estimate = estimated[plan.track.track]
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
            memory = "memory not estimated" if size is None else f"about {size / 2**30:.2f} GiB a rank"
            rounds = plan.track.measure.num_rounds
            lines.append(f"  {case.name:<24} {case.layout}, {rounds} rounds, {memory}")
    basis = f"an assumed {GPU_FLOPS_PER_S / 1e12:g} TFLOP/s a GPU" if on_gpu else "one core's measured speed"
    lines.append(f"all: about {_duration(total)} (estimated from FLOPs and {basis}, not promised)")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
