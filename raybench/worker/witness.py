"""The witness: a small process beside each rank that tells the driver what the rank no longer can.

It shares the rank's marker, so it knows the last operation; it holds the other end of a pipe, so it notices the
rank's death however that came about; it keeps its own connection to the sink, so it hears the order to stop and
the driver's death. At a round's deadline, or at an order, it has the rank write the stacks of all its threads
(`faulthandler`, which needs no cooperation of the interpreter) and torch's flight recorder (`worker.flight`, which
needs a little), reports them with the rank's last operations, and kills the rank. It imports nothing heavy, and it
always ends: with its rank, with the sink, or soon after either.

The rank starts it with the descriptors of the marker and of the files for stacks and the flight recorder as arguments,
and two pipes. Its standard input tells one line of JSON (`Assignment`), then single letters (`LEAVING`, `QUIT`); its
standard output `ready` or what is wrong, then `FLIGHT` whenever the recorder's content is wanted.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from raybench.results.schema import Status
from raybench.worker.marker import Marker, MarkerState
from raybench.worker.messages import Heartbeat, Introduction, RankFailed, Stop
from raybench.worker.outbox import SinkLostError, connect

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write its stacks. Neither Ray's workers nor torch use it."""
LEAVING = b"l"
"""From the rank: it told its end itself and now closes its process group; nothing is to be reported any more."""
QUIT = b"q"
"""From the rank: it no longer needs a witness."""
FLIGHT = b"f"
"""To the rank: write the flight recorder's content and a line's end."""

HEARTBEAT_S = 2.0
LOOK_S = 0.5
"""How often the marker's deadline is looked at."""
DUMP_S = 2.0
"""How long a rank may take to write its stacks, and then its flight recorder's content."""
MERCY_S = 3.0
"""A rank is not killed sooner than this after its deadline, so that others, which its end would wake, tell where they
hang first: those with a deadline close by, and those that the driver asks two seconds after the first report."""
LEAVE_S = 30.0
"""How long a rank may take to close its process group after its last word."""
ORPHAN_S = 5.0
"""The same, once the driver is gone."""
NO_STACK = "No stack"
_MOST_STACK_CHARACTERS = 20_000


@dataclass(frozen=True)
class Assignment:
    """What a witness must know."""

    rank: int
    pid: int
    thread: int
    """Identifier of the rank's training thread."""
    host: str
    port: int
    key: str


class Witness:
    """Watches one rank, its parent process."""

    def __init__(
        self, assignment: Assignment, marker: Marker, *, stacks_fd: int, flight_fd: int, pipe_fd: int, requests_fd: int
    ) -> None:
        """Connect to the sink.

        Raises:
            SinkLostError: the sink cannot be reached.
        """
        self._rank = assignment.rank
        self._pid = assignment.pid
        self._thread = assignment.thread
        self._marker = marker
        self._stacks_fd = stacks_fd
        self._flight_fd = flight_fd
        self._pipe_fd = pipe_fd
        self._requests_fd = requests_fd
        self._leave_by_s: float | None = None
        self._out_of_memory_kills = _out_of_memory_kills()
        self._connection, _ = connect(
            (assignment.host, assignment.port), assignment.key, Introduction(assignment.rank, witness=True)
        )

    def watch(self) -> None:
        """Return once the rank has ended or needs no witness; the rank is then dead or has said so itself."""
        beat_s = 0.0
        while True:
            now = time.monotonic()
            try:
                if now >= beat_s:
                    self._beat()
                    beat_s = now + HEARTBEAT_S
                ready = wait([self._pipe_fd, self._connection], min(LOOK_S, beat_s - now))
                letters = os.read(self._pipe_fd, 64) if self._pipe_fd in ready else None
                if letters == b"" or os.getppid() != self._pid:
                    self._report_death()
                    return
                if letters is not None and QUIT in letters:
                    return
                if letters is not None and LEAVING in letters:
                    self._leave_by_s = time.monotonic() + LEAVE_S
                if self._connection in ready and isinstance(order := self._connection.recv(), Stop):
                    self._end_by_order(order.reason)
                    return
            except (OSError, EOFError):
                self._end_orphan()
                return
            if self._end_if_late():
                return

    def _beat(self) -> None:
        state = self._marker.read()
        self._connection.send(Heartbeat(self._rank, state.case, state.round, state.operation))
        self._out_of_memory_kills = _out_of_memory_kills()

    def _end_if_late(self) -> bool:
        if self._leave_by_s is not None:
            if time.monotonic() > self._leave_by_s:
                self._kill()
                return True
            return False
        state = self._marker.read()
        if state.deadline_ns is None or time.monotonic_ns() < state.deadline_ns:
            return False
        age_s = (time.monotonic_ns() - state.since_ns) / 1e9
        reason = f"the round did not end in time: {age_s:.1f} s in {state.operation!r}"
        self._report_living(state, "timeout", reason, self._stacks(), culprit=True)
        time.sleep(max(0.0, state.deadline_ns / 1e9 + MERCY_S - time.monotonic()))
        self._kill()
        return True

    def _end_by_order(self, reason: str) -> None:
        """A rank that turns out to be dead is why others failed, whose word came first, and the order with it."""
        if self._leave_by_s is None:
            state, stack = self._marker.read(), self._stacks()
            if stack.startswith(NO_STACK) and self._has_died():
                self._report_death()
                return
            self._report_living(state, "crashed", reason, stack, culprit=False)
        self._kill()

    def _has_died(self) -> bool:
        if os.getppid() != self._pid:
            return True
        ready, _, _ = select.select([self._pipe_fd], [], [], 0)
        return bool(ready) and not os.read(self._pipe_fd, 64)

    def _end_orphan(self) -> None:
        """The driver is gone: nobody reads what this rank computes."""
        if self._leave_by_s is not None:
            end = time.monotonic() + ORPHAN_S
            while time.monotonic() < end and os.getppid() == self._pid:
                ready, _, _ = select.select([self._pipe_fd], [], [], LOOK_S)
                if ready and (not (letters := os.read(self._pipe_fd, 64)) or QUIT in letters):
                    return
        self._kill()

    def _report_death(self) -> None:
        if self._leave_by_s is not None:
            return
        state = self._marker.read()
        stack = self._stack_file(0)
        if stack:
            status: Status = "crashed"
            reason = f"its process (pid {self._pid}) died: {stack.splitlines()[0]}"
        elif _out_of_memory_kills() > self._out_of_memory_kills:
            status = "out_of_memory"
            reason = f"its process (pid {self._pid}) was ended by the host's out-of-memory killer"
        else:
            status = "crashed"
            reason = f"its process (pid {self._pid}) ended without a word, as after SIGKILL"
        self._try_report(state, status, reason, stack or f"{NO_STACK}: the process was gone before it could be asked.")

    def _report_living(self, state: MarkerState, status: Status, reason: str, stack: str, *, culprit: bool) -> None:
        """With all that the rank can still tell; one that writes no stack is not asked for more."""
        flight = None if stack.startswith(NO_STACK) else self._flight()
        self._try_report(state, status, reason, stack, culprit=culprit, flight=flight)

    def _try_report(
        self,
        state: MarkerState,
        status: Status,
        reason: str,
        stack: str,
        *,
        culprit: bool = True,
        flight: str | None = None,
    ) -> None:
        message = RankFailed(
            rank=self._rank,
            case=state.case,
            round=state.round,
            status=status,
            reason=reason,
            last_operation=state.operation,
            stack=stack,
            culprit=culprit,
            history=self._marker.history(),
            flight=flight,
        )
        try:
            self._connection.send(message)
        except OSError:
            return

    def _kill(self) -> None:
        if os.getppid() == self._pid:  # as long as it is the parent its number is not another process's
            os.kill(self._pid, signal.SIGKILL)

    def _stacks(self) -> str:
        """Have the rank write the stacks of its threads; what came, or a sentence why nothing did."""
        begin = os.fstat(self._stacks_fd).st_size
        if os.getppid() != self._pid:
            return f"{NO_STACK}: the process was gone before it could be asked."
        os.kill(self._pid, DUMP_SIGNAL)
        end = time.monotonic() + DUMP_S
        size, quiet = begin, 0
        while time.monotonic() < end and quiet < 3:
            time.sleep(0.05)
            now = os.fstat(self._stacks_fd).st_size
            quiet = quiet + 1 if now == size > begin else 0
            size = now
        return self._stack_file(begin) or f"{NO_STACK} within {DUMP_S:g} s: {_why_silent(self._pid)}."

    def _flight(self) -> str | None:
        """The flight recorder's content as JSON, or None where the rank does not give it in time."""
        begin = os.fstat(self._flight_fd).st_size
        try:
            os.write(self._requests_fd, FLIGHT)
        except OSError:
            return None
        end = time.monotonic() + DUMP_S
        while time.monotonic() < end and os.getppid() == self._pid:
            size = os.fstat(self._flight_fd).st_size
            if size > begin and os.pread(self._flight_fd, 1, size - 1) == b"\n":
                return os.pread(self._flight_fd, size - begin, begin).decode(errors="replace").strip()
            time.sleep(0.02)
        return None

    def _stack_file(self, begin: int) -> str:
        """What the rank wrote after `begin`, its training thread first."""
        size = os.fstat(self._stacks_fd).st_size
        text = os.pread(self._stacks_fd, min(size - begin, 1 << 20), begin).decode(errors="replace")
        blocks = re.split(r"\n\n(?=Thread 0x|Current thread 0x)|(?<=\n)(?=Thread 0x|Current thread 0x)", text)
        own = f"0x{self._thread:016x}"
        named = [re.sub(rf"^(Current thread|Thread) {own}", "Training thread", b.strip("\n")) for b in blocks]
        first = [b for b in named if b.startswith(("Fatal", "Training"))]
        rest = [b for b in named if b and b not in first]
        return "\n\n".join(first + rest)[:_MOST_STACK_CHARACTERS]


def _why_silent(pid: int) -> str:
    """Why a living process does not answer a signal, as far as the system tells."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "the process did not answer"
    return {
        "T": "the process is stopped (SIGSTOP)",
        "t": "the process is stopped by a debugger",
        "D": "the process is in an uninterruptible system call",
        "Z": "the process is dead",
    }.get(state, f"the process did not answer (state {state})")


def _out_of_memory_kills() -> int:
    """How many processes this host's kernel ended for want of memory since it started; 0 if it does not tell."""
    try:
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def main() -> None:
    """Watch the rank that started this process, after one line on standard output: `ready`, or what is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)
        if not letter:
            return
        line += letter
    marker_fd, stacks_fd, flight_fd = map(int, sys.argv[1:])
    marker = Marker.attach(marker_fd)
    try:
        witness = Witness(
            Assignment(**json.loads(line)), marker, stacks_fd=stacks_fd, flight_fd=flight_fd, pipe_fd=0, requests_fd=1
        )
    except SinkLostError as error:
        os.write(1, f"{error}\n".encode())
        return
    os.write(1, b"ready\n")
    witness.watch()


if __name__ == "__main__":
    main()
