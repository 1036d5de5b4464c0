"""What raybench's own recording writes around the launch of an operation, and reads again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SHOWN = 8
PREFIX = "raybench:comm:"
ACTION = "raybench:action:"
"""Before a pipeline's action, such as 2F0."""
PHASE = "raybench:phase:"
"""Before forward, backward and optimizer."""


@dataclass(frozen=True, slots=True)
class Label:
    """An operation as the strategy knows it."""

    kind: str
    axis: str
    ranks: str
    """Global ranks of the group, or the two ends of a channel, so that groups of one axis can be told apart."""
    group_size: int
    payload_bytes: int
    label: str
    """Such as the name of the bucket."""

    @classmethod
    def of(cls, kind: str, axis: str, ranks: Sequence[int], payload_bytes: int, label: str) -> Label:
        """With the ranks in words: all of them, or of many the first two and the last."""
        shown = ",".join(map(str, ranks)) if len(ranks) <= MAX_SHOWN else f"{ranks[0]},{ranks[1]}…{ranks[-1]}"
        return cls(kind, axis, shown, len(ranks), payload_bytes, label)

    @property
    def group(self) -> str:
        """Axis and ranks."""
        return f"{self.axis} [{self.ranks}]"

    def __str__(self) -> str:
        return f"{PREFIX}{self.kind}:{self.axis}:{self.ranks}:{self.group_size}:{self.payload_bytes}:{self.label}"

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """The inverse of `str`; None for any other name."""
        if not name.startswith(PREFIX):
            return None
        parts = name.removeprefix(PREFIX).split(":", 5)
        if len(parts) < 6 or not (parts[3].isdecimal() and parts[4].isdecimal()):
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]), parts[5])
