"""A rank's presence: all by which the driver knows how the rank fares, from its first word to its last."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

from raybench.results.schema import Status
from raybench.worker.flight import FlightThread
from raybench.worker.identity import Identity
from raybench.worker.marker import Marker
from raybench.worker.messages import Farewell, Hello, RankFailed
from raybench.worker.outbox import Outbox, SinkLostError
from raybench.worker.witness import DUMP_SIGNAL, LEAVING, QUIT, Assignment

if TYPE_CHECKING:
    from raybench.suite.job import RankJob

READY_S = 20.0
"""How long a witness may take to start."""
_MEMORY = re.compile(r"out of memory|(can't|cannot|failed to|unable to) allocate|not enough memory", re.I)
_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|(closed|reset) by (remote )?peer|broken pipe"
    r"|timed out (waiting|after)|wait timeout|socket timeout|remote process exit|ncclRemoteError"
    r"|communicator was aborted|failed to recv|connection abort|no route to host|socket closed",
    re.I,
)
_PEER_ERRORS = ("DistStoreError", "DistNetworkError", "SinkLostError")


class Presence:
    """Marker, outbox and witness of one rank. As a context manager it tells how the rank's work ended."""

    def __init__(
        self,
        identity: Identity,
        marker: Marker,
        send: Callable[[object], None],
        *,
        leave: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.identity = identity
        self.marker = marker
        self._send = send
        self._leave = leave
        self._process: _WitnessProcess | None = None
        self._outbox: Outbox | None = None

    @classmethod
    def start(
        cls,
        job: RankJob,
        identity: Identity,
        *,
        leave: Callable[[BaseException | None], None] | None = None,
    ) -> Self:
        """Connect to the job's sink and start the witness.

        `leave` is called at the end with the error, if any, after the driver was told: it closes the process
        group. It may take 30 s, then the witness kills this process.

        Raises:
            SinkLostError: the sink cannot be reached.
        """
        with _shared_files() as (marker, stacks_fd, flight_fd):
            process = _WitnessProcess(job, identity, marker, stacks_fd, flight_fd)
            try:
                outbox = Outbox(job.sink_address, job.sink_key, identity.rank)
                process.wait_ready()
            except BaseException:
                process.end()
                raise
        presence = cls(identity, marker, outbox.send, leave=leave)
        presence._process = process
        presence._outbox = outbox
        return presence

    @classmethod
    def detached(cls, identity: Identity, send: Callable[[object], None] = lambda message: None) -> Self:
        """One without a witness or a sink: messages go to `send`."""
        return cls(identity, Marker.null(), send)

    def send(self, message: object) -> None:
        """Send one message to the driver.

        Raises:
            SinkLostError: the driver is gone.
        """
        self._send(message)

    def hello(self) -> None:
        """Tell the driver that this rank's process group is made."""
        identity = self.identity
        self.send(Hello(identity.rank, identity.node, identity.local_rank, os.getpid()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        state, history = self.marker.read(), self.marker.history()
        self.marker.end_round()
        try:
            with contextlib.suppress(SinkLostError):
                if error is None:
                    self.send(Farewell(self.identity.rank))
                else:
                    status, culprit = classify(error)
                    self.send(
                        RankFailed(
                            rank=self.identity.rank,
                            case=state.case,
                            round=state.round,
                            status=status,
                            reason=one_line(error),
                            last_operation=state.operation,
                            stack="".join(traceback.format_exception(error)),
                            culprit=culprit,
                            history=history,
                        )
                    )
            if self._process is not None:
                self._process.tell(LEAVING)
            if self._leave is not None:
                self._leave(error)
        finally:
            if self._process is not None:
                self._process.end()
            if self._outbox is not None:
                self._outbox.close()


class _WitnessProcess:
    """The witness, seen from the rank that started it."""

    def __init__(self, job: RankJob, identity: Identity, marker: Marker, stacks_fd: int, flight_fd: int) -> None:
        import raybench

        shared = (marker.fileno(), stacks_fd, flight_fd)

        root = str(Path(raybench.__file__).resolve().parents[1])
        # Without site-packages (-S) and the current folder (-P) it starts in a few milliseconds.
        self._popen = subprocess.Popen(
            [sys.executable, "-S", "-P", "-m", "raybench.worker.witness", *map(str, shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=shared,
            env={"PYTHONPATH": root, "PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,
            cwd="/",
        )
        assert self._popen.stdin is not None
        self._pipe_fd: int | None = self._popen.stdin.fileno()
        os.register_at_fork(after_in_child=self._forget)
        self._stacks_fd, self._flight_fd = stacks_fd, flight_fd
        faulthandler.register(DUMP_SIGNAL, file=stacks_fd, all_threads=True)
        faulthandler.enable(file=stacks_fd, all_threads=True)
        host, port = job.sink_address
        assignment = Assignment(identity.rank, os.getpid(), threading.get_ident(), host, port, job.sink_key)
        self.tell(json.dumps(asdict(assignment)).encode() + b"\n")

    def wait_ready(self) -> None:
        """Return once the witness watches; from then on it may ask for the flight recorder's content."""
        assert self._popen.stdout is not None
        with self._popen.stdout as answers:
            ready, _, _ = select.select([answers], [], [], READY_S)
            answer = answers.readline().decode().strip() if ready else f"no answer within {READY_S:g} s"
            if answer == "ready":
                FlightThread(os.dup(answers.fileno()), os.dup(self._flight_fd))
        if answer != "ready":
            raise SinkLostError(f"the rank's witness did not start: {answer or 'it ended at once'}")

    def tell(self, letters: bytes) -> None:
        if self._pipe_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe_fd, letters)

    def end(self) -> None:
        """Dismiss the witness and wait for it, at most 5 s."""
        self.tell(QUIT)
        try:
            self._popen.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        assert self._popen.stdin is not None
        self._pipe_fd = None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        faulthandler.unregister(DUMP_SIGNAL)
        faulthandler.enable(file=2, all_threads=True)
        os.close(self._stacks_fd)
        os.close(self._flight_fd)

    def _forget(self) -> None:
        """In a forked child: let go of the pipe, whose closing must mean this rank's death."""
        if self._pipe_fd is not None:
            os.close(self._pipe_fd)
            self._pipe_fd = None


@contextlib.contextmanager
def _shared_files() -> Iterator[tuple[Marker, int, int]]:
    """A marker, a file for stacks and one for the flight recorder's content, already without a name once the witness
    has them: nothing to clean up."""
    memory = Path("/dev/shm")  # not on a disk, whose write-back would stall marks
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="raybench-", dir=parent) as folder:
        marker = Marker.create(Path(folder) / "marker")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        stacks, flight = (os.open(Path(folder) / name, flags, 0o600) for name in ("stacks", "flight"))
        yield marker, stacks, flight


def classify(error: BaseException) -> tuple[Status, bool]:
    """The status that an error gives its rank's round, and whether this rank is where it began."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for link in chain:
        if isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError" or _MEMORY.search(str(link)):
            return "out_of_memory", True
    follows = (
        isinstance(error, ConnectionError)
        or type(error).__name__ in _PEER_ERRORS
        or (isinstance(error, RuntimeError | OSError) and bool(_PEER.search(str(error))))
    )
    return "failed", not follows


def one_line(error: BaseException) -> str:
    """An error's kind and its message's first line, at most 400 characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 400 else f"{text[:399]}…"
