"""What raybench's own recording writes around the launch of an operation, and reads again."""

from __future__ import annotations

from dataclasses import dataclass

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
    group_size: int
    payload_bytes: int
    label: str
    """Such as the name of the bucket."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.kind}:{self.axis}:{self.group_size}:{self.payload_bytes}:{self.label}"

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """The inverse of `str`; None for any other name."""
        if not name.startswith(PREFIX):
            return None
        parts = name.removeprefix(PREFIX).split(":", 4)
        if len(parts) < 5 or not (parts[2].isdecimal() and parts[3].isdecimal()):
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]), parts[4])
