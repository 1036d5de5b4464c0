"""Which rank this process is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """A rank's place, as Ray or torchrun gave it."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of its node."""
    node: str
    """Address of its node."""
