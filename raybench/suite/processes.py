"""Processes that this one started, directly or not: finding them, and seeing them end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process that is told apart from a later one of the same number by when it started."""

    pid: int
    started: str


def descendants(pid: int) -> list[tuple[Process, int]]:
    """The living processes below `pid` with their parents' numbers, parents first.

    Those whose parent has ended are not found.
    """
    table = _table()
    found: list[tuple[Process, int]] = []
    parents = [pid]
    while parents:
        parent = parents.pop(0)
        for process, its_parent in table:
            if its_parent == parent:
                found.append((process, parent))
                parents.append(process.pid)
    return found


def everyone() -> list[Process]:
    """All living processes."""
    return [process for process, _ in _table()]


def alive(processes: Iterable[Process]) -> list[Process]:
    """Those of the processes that still run."""
    now = set(everyone())
    return [process for process in processes if process in now]


def end(processes: Iterable[Process], *, patience_s: float) -> None:
    """Wait at most `patience_s` for the processes to end by themselves, then kill what is left."""
    left = list(processes)
    deadline = time.monotonic() + patience_s
    while (left := alive(left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        kill(process)


def kill(process: Process) -> None:
    """SIGKILL, unless the process has ended."""
    if alive([process]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _table() -> list[tuple[Process, int]]:
    """Every living process with its parent's number; zombies are not living."""
    root = Path("/proc")
    if not (root / "self" / "stat").exists():
        return _table_of_ps()
    table = []
    for entry in os.listdir(root):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (root / entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                table.append((Process(int(entry), fields[19]), int(fields[1])))
    return table


def _table_of_ps() -> list[tuple[Process, int]]:
    lines = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    rows = [line.split(None, 3) for line in lines]
    return [(Process(int(r[0]), r[3]), int(r[1])) for r in rows if len(r) == 4 and "Z" not in r[2]]
