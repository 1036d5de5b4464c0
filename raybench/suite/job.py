"""What is handed to the workers of one job: everything they need, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from raybench.suite.track import ResolvedTrack


class RoundKey(BaseModel):
    """One round of one case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    case: str
    round: int


class RankJob(BaseModel):
    """What launchers and ranks need to know of a job, whatever it does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite_id: str
    attempt: int
    backend: str = "gloo"
    """`nccl` where every rank has a GPU of its own, else `gloo`."""
    world_size: int
    sink_address: tuple[str, int]
    sink_key: str
    """Hexadecimal secret that opens the sink."""
    environment: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables (NCCL settings) set in every worker before its group is made."""
    with_nsys: bool = False
    """Steps are traced by nsys, which watches the ranks, instead of torch.profiler."""


class Job(RankJob):
    """One attempt at a track."""

    track: ResolvedTrack
    """Holds only the cases of this attempt."""
    rounds: tuple[RoundKey, ...]
    """What is left to do, in the order in which to do it."""
    gate_passed: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    """Gate results of earlier attempts by case: those cases are not gated again."""
    micro_batch_sizes: Mapping[str, int] = Field(default_factory=dict)
    """With `micro_batch: largest`, what earlier attempts found by case."""
    verify_only: bool = False
    """The gate alone, nothing timed."""
    trace_steps: int = 0
    """Steps to trace of every case, after its last round's window."""
    deadline_unix_s: float | None = None
    """When the budget of this track ends: no later round is begun once every case has had one."""


def read_job(text: str | bytes) -> RankJob:
    """A job of whichever kind from its JSON."""
    from raybench.comm.sweep import CommJob

    adapter: TypeAdapter[Job | CommJob] = TypeAdapter(Job | CommJob)
    return adapter.validate_json(text)
