"""What every command comes down to: an answer for a person and as JSON, and an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command says at its end."""

    exit_code: int = 0
    table: Any = None
    """Anything that rich can print; comes before the text."""
    text: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The same as JSON."""
    is_error: bool = False
    """Whether the text is an error message, for stderr."""


def failure(message: str, exit_code: int) -> Answer:
    """One message and nothing else."""
    return Answer(
        exit_code=exit_code,
        text=f"raybench: {message}",
        document=document(exit_code, errors=[message]),
        is_error=True,
    )


def document(
    exit_code: int, *, rows: Sequence[Mapping[str, Any]] = (), errors: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """The shape that every command's JSON has."""
    return {"schema": SCHEMA, "exit_code": exit_code, **more, "rows": list(rows), "errors": list(errors)}
