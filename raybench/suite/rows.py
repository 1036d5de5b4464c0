"""The columns of `runs` that the driver knows, filled in one place; ranks send only what they measured."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from raybench.models.flops import flops_per_token, num_parameters
from raybench.results.schema import Status
from raybench.suite.cluster import Cluster, Node
from raybench.suite.plan import TrackPlan
from raybench.suite.track import Case, OptimizerConfig
from raybench.worker.messages import Hello, Row

PACKAGE = Path(__file__).resolve().parents[1]
BATCH_COLUMNS = ("micro_batch_size", "tokens_per_step", "workload_hash")
"""Columns of `runs` that follow from what was found with `micro_batch: largest`."""


@dataclass(frozen=True)
class Code:
    """Which raybench ran."""

    git_commit: str | None
    git_dirty: bool | None
    source_hash: str
    """Ten hexadecimal digits over the package's source, equal exactly for equal code."""


@cache
def this_code() -> Code:
    """The raybench that this process runs; commit and state where it runs from a checkout."""
    commit = None
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = _git("rev-parse", "--verify", "HEAD")
    state = None if commit is None else _git("status", "--porcelain", "--", ".")
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return Code(commit, None if state is None else bool(state), digest.hexdigest()[:10])


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True, kw_only=True)
class RowMaker:
    """Makes rows of `runs` for one track of a suite."""

    suite_id: str
    plan: TrackPlan
    cluster: Cluster
    launcher: str = "ray"
    nccl_env: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        case: Case,
        *,
        round: int,
        attempt: int,
        status: Status,
        reason: str | None = None,
        measured: Mapping[str, Any] | None = None,
        hellos: Mapping[int, Hello] | None = None,
        started_at: datetime | None = None,
    ) -> Row:
        """One row: what is known beforehand, with what was measured laid over it.

        Args:
            hellos: of the ranks that took part.
        """
        measured = dict(measured or {})
        told = measured.pop("environment", None) or {}
        environment = {**self._environment(case), **(json.loads(told) if isinstance(told, str) else told)}
        num_nodes = len({hello.node for hello in (hellos or {}).values()}) or self._planned_nodes(case, status)
        known = {column: value for column, value in measured.items() if value is not None}
        return {
            **self._workload(case),
            **version_columns(self.cluster, self.launcher),
            **device_columns(self._nodes(), self.plan.backend),
            "gate": "not_run",
            "num_nodes": num_nodes,
            "started_at": started_at or datetime.now(UTC),
            **known,
            "suite_id": self.suite_id,
            "track": self.plan.track.track,
            "case": case.name,
            "round": round,
            "attempt": attempt,
            "status": status,
            "reason": reason,
            "environment": json.dumps(environment, sort_keys=True, default=str),
        }

    def _planned_nodes(self, case: Case, status: Status) -> int | None:
        if status == "skipped" or self.plan.placement is None:
            return None
        return self.plan.placement.num_nodes(case.layout.num_ranks)

    def _workload(self, case: Case) -> Row:
        track = self.plan.track
        work, measure, layout = track.workload_of(case), track.measure, case.layout
        return {
            "scale": track.scale,
            "peer": case.peer,
            "data_strategy": case.strategy.data,
            "pipeline_strategy": case.strategy.pipeline,
            "tensor_strategy": case.strategy.tensor,
            "data_size": layout.data,
            "pipeline_size": layout.pipeline,
            "tensor_size": layout.tensor,
            "num_ranks": layout.num_ranks,
            "model": work.model.name,
            "num_parameters": num_parameters(work),
            "sequence_length": work.sequence_length,
            "micro_batch_size": work.micro_batch_size,
            "num_micro_batches": work.num_micro_batches,
            "tokens_per_step": work.tokens_per_step(layout.data),
            "scaling": track.scaling,
            "micro_batch": track.micro_batch,
            **{f"flops_per_token_{name}": flops for name, flops in (flops_per_token(work) or {}).items()},
            "precision": work.precision,
            "tf32": work.tf32,
            "optimizer": describe_optimizer(work.optimizer),
            "recompute": work.recompute,
            "compiled": work.compile,
            "data": work.data.described,
            "seed": work.seed,
            "workload_hash": work.hash,
            "num_warmup_steps": measure.num_warmup_steps,
            "num_steps": measure.num_steps,
        }

    def _nodes(self) -> Sequence[Node]:
        """The nodes that the track's ranks are placed on, or all where nothing is placed."""
        if self.plan.placement is None:
            return self.cluster.nodes
        used = {share.address for share in self.plan.placement.nodes}
        return [node for node in self.cluster.nodes if node.address in used]

    def _environment(self, case: Case) -> dict[str, Any]:
        placement = self.plan.placement
        return {
            "launcher": self.launcher,
            "nodes": described_nodes(self._nodes()),
            "ranks_share_cores": self.plan.shares_cores,
            "tensor_groups_across_nodes": self.plan.num_crossing(case),
            "cpus_per_rank": None if placement is None else placement.cpus_per_rank,
            "nccl_env": dict(self.nccl_env),
            "inherited_nccl_env": inherited_settings(),
            "options": dict(case.options),
            "source_hash": this_code().source_hash,
        }


def version_columns(cluster: Cluster, launcher: str) -> Row:
    """The columns that say which code ran."""
    code, versions = this_code(), cluster.versions
    return {
        "torch_version": versions["torch"],
        "ray_version": versions["ray"] if launcher == "ray" else None,
        "python_version": versions["python"],
        "raybench_version": versions["raybench"],
        "git_commit": code.git_commit,
        "git_dirty": code.git_dirty,
    }


def device_columns(nodes: Sequence[Node], backend: str) -> Row:
    """The columns that say what the ranks on these nodes compute with."""
    if backend == "nccl":
        gpus = [gpu for node in nodes for gpu in node.gpus]
        sizes = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes]
        names = {gpu.name for gpu in gpus}
        memory = min(sizes, default=None)
    else:
        names = {node.cpu_model for node in nodes}
        memory = None
    return {"backend": backend, "device": ", ".join(sorted(names)), "device_memory_bytes": memory}


def described_nodes(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Nodes as `environment` holds them."""
    return [
        {
            "address": node.address,
            "host": node.host,
            "cpu_model": node.cpu_model,
            "num_cpus": node.num_cpus,
            "memory_bytes": node.memory_bytes,
            "gpus": [gpu.name for gpu in node.gpus],
            "interface": node.interface,
        }
        for node in nodes
    ]


def inherited_settings() -> dict[str, str]:
    """Settings of NCCL and gloo that were in the environment already: file paths and names, never secrets."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(("NCCL_", "GLOO_"))}


def describe_optimizer(optimizer: OptimizerConfig) -> str:
    """Name and settings of an optimizer in one text."""
    parts = [optimizer.name, f"lr={optimizer.learning_rate:g}", f"weight_decay={optimizer.weight_decay:g}"]
    if optimizer.schedule != "constant" or optimizer.warmup_steps:
        parts.append(f"schedule={optimizer.schedule}")
        parts.append(f"warmup_steps={optimizer.warmup_steps}")
    return " ".join(parts)


def rank_row(rank: int, hellos: Mapping[int, Hello]) -> Row:
    """The columns of `ranks` that say where a rank is."""
    hello = hellos.get(rank)
    if hello is None:
        return {"rank": rank}
    nodes = list(dict.fromkeys(hellos[other].node for other in sorted(hellos)))
    return {
        "rank": rank,
        "node": hello.node,
        "node_rank": nodes.index(hello.node),
        "local_rank": hello.local_rank,
    }
