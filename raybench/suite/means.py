"""What tracks are run with, besides their plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raybench.suite.job_run import MakeSink, Patience
from raybench.suite.launch import Launcher
from raybench.suite.plan import TrackPlan
from raybench.suite.progress import Progress
from raybench.worker.messages import Row


class Store(Protocol):
    """Keeps the rows of complete rounds."""

    def write_round(
        self, track: str, case: str, attempt: int, round: int, tables: Mapping[str, Sequence[Row]]
    ) -> None: ...

    def write_trace(self, track: str, case: str, rank: int, data: bytes) -> None: ...

    def write_hang(self, track: str, case: str, round: int, attempt: int, files: Mapping[str, str]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Means:
    """All that a track needs to be run, besides its plan."""

    store: Store
    launcher: Launcher
    make_sink: MakeSink
    progress: Progress
    patience: Patience = field(default_factory=Patience)
    verify_only: bool = False
    trace_steps: int = 0
    with_nsys: bool = False
    replan: Callable[[TrackPlan], TrackPlan] = lambda plan: plan
    """Asked after a job broke: plans the track again for the nodes that are still there."""
