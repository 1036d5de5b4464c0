"""One door to the readers: a kind and a path in, the answer out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from raybench.doctor import topo
from raybench.doctor.findings import Result
from raybench.doctor.nccl import read_blocks, read_nccl
from raybench.doctor.story import story
from raybench.doctor.text import stream_blocks, stream_lines
from raybench.doctor.topo import read_topo
from raybench.doctor.watchdog import read_watchdog, relevant_text

Kind = Literal["topo", "nccl", "watchdog"]

__all__ = ["Kind", "read_file", "read_nccl", "read_topo", "read_watchdog", "story"]


def read_file(kind: Kind, path: Path) -> Result:
    """The facts and findings of one file; a RequestError where the path cannot be read."""
    if kind == "nccl":
        return read_blocks(stream_blocks(path))
    if kind == "watchdog":
        return read_watchdog(relevant_text(stream_lines(path)))
    return read_topo(topo.relevant_text(stream_lines(path)))
