"""A rank without torch, for tests of its witness.

Usage: python -m tests.worker.light_rank HOST PORT KEY BEHAVIOUR [DEADLINE_S]
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from raybench.worker.identity import Identity
from raybench.worker.presence import Presence


def finish(presence: Presence) -> None:
    pass


def wait(presence: Presence) -> None:
    time.sleep(3600)


def be_killed(presence: Presence) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped(presence: Presence) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die_when_asked(presence: Presence) -> None:
    """As one that is ending already when the driver's order comes."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    time.sleep(3600)


def hold_the_interpreter(presence: Presence) -> None:
    """In a C call that keeps the interpreter's lock and that no signal ends."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def crash(presence: Presence) -> None:
    ctypes.string_at(0)


def raise_an_error(presence: Presence) -> None:
    raise ValueError("the model is wrong")


def exit_at_once(presence: Presence) -> None:
    os._exit(3)


def fork_and_be_killed(presence: Presence) -> None:
    """The child holds what it inherited and lives on for a while."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    be_killed(presence)


def start_a_program_and_be_killed(presence: Presence) -> None:
    subprocess.Popen(["sleep", "20"])
    be_killed(presence)


def leave_for_ever(error: BaseException | None) -> None:
    time.sleep(3600)


def main(host: str, port: str, key: str, behaviour: str, deadline_s: str = "3600") -> None:
    job: Any = SimpleNamespace(sink_address=(host, int(port)), sink_key=key)
    identity = Identity(rank=1, world_size=2, local_rank=1, node="127.0.0.1")
    leave = leave_for_ever if behaviour == "leave_for_ever" else None
    with Presence.start(job, identity, leave=leave) as presence:
        presence.hello()
        presence.marker.begin_round("one", 2, time.monotonic_ns() + int(float(deadline_s) * 1e9))
        presence.marker.mark(f"step 3: {behaviour}")
        (finish if leave else globals()[behaviour])(presence)


if __name__ == "__main__":
    main(*sys.argv[1:])
