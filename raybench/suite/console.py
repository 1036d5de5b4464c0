"""Rich's console, without its habit of ending the process when nobody reads any more."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console


class SafeConsole(Console):
    """A closed pipe is an OSError, as for any other stream."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_for(stream: TextIO, *, width: int | None = None) -> Console:
    """A console that writes to `stream`, as wide as its terminal unless `width` is given."""
    return SafeConsole(file=stream, width=width, highlight=False)
