"""How far one case of a track is, while the track runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raybench.results.schema import Status
from raybench.suite.track import Case


@dataclass
class CaseState:
    """How far one case is."""

    case: Case
    rounds: tuple[int, ...]
    """All rounds that were asked for."""
    done: set[int] = field(default_factory=set)
    status: Status = "ok"
    reason: str | None = None
    gate: Mapping[str, Any] | None = None
    """The gate's columns, once it passed."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    """With `micro_batch: largest`, the columns that tell what was found (`BATCH_COLUMNS`)."""
    num_nodes: int | None = None
    """Nodes that the rounds done were on."""
    cut: str | None = None
    """Why there are no more rounds though nothing went wrong with it; None while there are."""

    @property
    def left(self) -> list[int]:
        if self.status != "ok" or self.cut:
            return []
        return [number for number in self.rounds if number not in self.done]

    def describe_cut(self) -> str:
        return f"{len(self.done)} of {len(self.rounds)} rounds, {self.cut}"
