"""`raybench list`: the suite's tracks and cases, what each needs, and whether it can run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raybench.suite.catalog import whole_suite
from raybench.suite.cluster import Cluster
from raybench.suite.plan import TrackPlan, plan_track
from raybench.suite.track import Case, Layout
from raybench.wording import count


def plan_suite(cluster: Cluster) -> list[TrackPlan]:
    """Every track of the suite at the scale that this cluster gets by default."""
    scale = cluster.default_scale
    return [plan_track(target.track.resolve(scale), cluster) for target in whole_suite()]


def describe_case(track: str, case: Case) -> dict[str, Any]:
    """The columns that say which case a row is about."""
    return {
        "track": track,
        "case": case.name,
        "peer": case.peer,
        "layout": case.layout.model_dump(),
        "strategy": case.strategy.model_dump(),
    }


def listed_rows(plans: Sequence[TrackPlan]) -> list[dict[str, Any]]:
    """One object a case."""
    rows = []
    for plan in plans:
        reasons = {case.name: reason for case, reason in plan.skipped}
        for case in plan.track.cases:
            rows.append(
                {
                    **describe_case(plan.track.track, case),
                    "title": plan.track.title,
                    "scale": plan.track.scale,
                    "num_ranks": case.layout.num_ranks,
                    "runs": case.name not in reasons,
                    "reason": reasons.get(case.name),
                }
            )
    return rows


def describe_cluster(cluster: Cluster) -> list[dict[str, Any]]:
    """One object a node."""
    return [asdict(node) for node in cluster.nodes]


def list_text(plans: Sequence[TrackPlan], cluster: Cluster) -> str:
    """Tracks and cases for a person."""
    lines = [f"here: {cluster.describe()}; scale {cluster.default_scale}"]
    cells = {
        (plan.track.track, case.name): (
            case.name,
            _needs(case.layout),
            f"peer ({case.peer})" if case.peer else "by hand",
        )
        for plan in plans
        for case in plan.track.cases
    }
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    for plan in plans:
        lines += ["", f"{plan.track.track}: {plan.track.title}", f"  {plan.track.question}"]
        reasons = {case.name: reason for case, reason in plan.skipped}
        for case in plan.track.cases:
            row = cells[plan.track.track, case.name]
            verdict = f"no: {reasons[case.name]}" if case.name in reasons else "yes"
            lines.append(
                "  ".join(["", *(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)), verdict])
            )
    return "\n".join(lines)


def _needs(layout: Layout) -> str:
    nodes = f" on {layout.nodes} nodes" if layout.nodes > 1 else ""
    return f"{count(layout.num_ranks, 'rank')}{nodes} ({layout})"


def cluster_text(cluster: Cluster) -> str:
    """Every node for a person."""
    lines = []
    for node in cluster.nodes:
        names = ", ".join(sorted({gpu.name for gpu in node.gpus}))
        gpus = f"{node.free_gpus} of {len(node.gpus)} GPUs free ({names})" if node.gpus else "no GPU"
        lines.append(
            f"node {node.address} ({node.host}): {node.cpu_model}, "
            f"{node.free_cpus:g} of {node.total_cpus:g} CPUs free, {node.memory_bytes / 2**30:.0f} GiB, {gpus}, "
            f"interface {node.interface or 'unknown'}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in cluster.versions.items())
    return "\n".join([*lines, f"versions: {versions}"])


def describe_nccl() -> dict[str, Any]:
    """The NCCL settings that the ranks of this cluster get unless `--nccl-env` says otherwise.

    Returns:
        `chosen`: the name that the cluster's file chose, or None; `title`; `settings`: one object a variable with its
        value, why it has it and since which version it is read; `inherited`: what this node's environment has besides;
        `known`: names that `--nccl-env` takes.

    Raises:
        RequestError: the cluster chose a name that is not known.
    """
    from raybench.suite.nccl_env import VARIABLE, load_environments, resolve, selected, settings_of
    from raybench.suite.rows import inherited_settings

    chosen, known = selected(), load_environments()
    settings: list[dict[str, Any]] = []
    if chosen in known:
        settings = [setting.model_dump() for setting in settings_of(str(chosen)).values()]
    elif chosen is not None:
        settings = [
            {"name": name, "value": value, "why": f"line of {chosen}", "since": None}
            for name, value in resolve(chosen, VARIABLE).items()
        ]
    names = {setting["name"] for setting in settings}
    return {
        "chosen": chosen,
        "title": known[chosen].title if chosen in known else None,
        "settings": settings,
        "inherited": {name: value for name, value in inherited_settings().items() if name not in names},
        "known": list(known),
    }


def nccl_text(nccl: Mapping[str, Any]) -> str:
    """What `describe_nccl` found, for a person."""
    title = f" ({nccl['title']})" if nccl["title"] else ""
    choice = f"{nccl['chosen']}{title}, chosen by the cluster" if nccl["chosen"] else "none chosen by the cluster"
    lines = [f"NCCL settings: {choice}; --nccl-env knows {', '.join(nccl['known'])}"]
    pairs = [f"{setting['name']}={setting['value']}" for setting in nccl["settings"]]
    width = min(max(map(len, pairs), default=0), 40)
    for pair, setting in zip(pairs, nccl["settings"], strict=True):
        since = f" (since {setting['since']})" if setting["since"] else ""
        lines.append(f"  {pair:<{width}}  {setting['why']}{since}")
    if nccl["inherited"]:
        here = " ".join(f"{name}={value}" for name, value in nccl["inherited"].items())
        lines.append(f"  this node's environment has besides: {here}")
    return "\n".join(lines)
