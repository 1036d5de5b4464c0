"""Ends an embedded Ray whose driver was killed: parts of it would live on for a minute, and its folder for ever.

Every process of an embedded Ray has the Ray's folder in its environment, by which it is found. The guard is started
by the driver before its Ray, with the folder as argument, and waits until the driver closes its standard input: after a
letter if all is well, without one if the driver died.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from raybench.suite import processes

VARIABLE = "RAYBENCH_EMBEDDED_RAY"
"""In the environment of an embedded Ray: its folder."""
PATIENCE_S = 3.0
"""How long processes may take to end by themselves."""


def members(folder: str) -> list[processes.Process]:
    """The living processes of the embedded Ray in `folder`, but not this one. Known on Linux alone."""
    mark = f"{VARIABLE}={folder}".encode()
    found = []
    for process in processes.everyone():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if mark in environment and process.pid != os.getpid():
                found.append(process)
    return found


def sweep(folder: str) -> None:
    """End what is left of the embedded Ray in `folder`, after a few seconds in which it may end by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := members(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        processes.kill(process)


@contextlib.contextmanager
def guarded(folder: str, *, remove: bool) -> Iterator[None]:
    """While the block runs a guard sees to what happens in `folder` if this process is killed.

    The folder is removed then if `remove`.
    """
    guard = subprocess.Popen(
        [sys.executable, "-S", "-P", "-m", __name__, folder, "remove" if remove else "keep"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        guard.communicate(b"q")


def main(folder: str, then: str) -> None:
    """Wait for the driver's end, and clean up if it said nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stdin.buffer.read():
        return
    sweep(folder)
    if then == "remove":
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
