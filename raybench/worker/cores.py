"""Cores: each rank of a case keeps to its own, where there are enough."""

from __future__ import annotations

import os
from pathlib import Path


def share_of(cores: list[int], index: int, num_ranks: int) -> list[int]:
    """The cores of the `index`-th of `num_ranks` ranks of a node: a part of its own, or one shared in turn."""
    if num_ranks > len(cores):
        return [cores[index % len(cores)]]
    size = len(cores) // num_ranks
    return cores[index * size : (index + 1) * size]


def pin(cores: list[int]) -> None:
    """Keep every thread of this process, those of the communication library too, on `cores`.

    Threads started later inherit it from the thread that starts them. Does nothing where the system has no such call.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except OSError:
            continue  # the thread ended meanwhile


def available() -> list[int]:
    """Numbers of the cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0))
