"""One job from its start to its end: what its ranks say is handed on, and whoever breaks it is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from raybench.results.schema import Status
from raybench.suite.attempt import Attempt, Blame, Round
from raybench.suite.job import RankJob
from raybench.suite.launch import Launched, Launcher
from raybench.suite.placement import Placement
from raybench.worker.messages import CaseRefused, Message, RoundBegun

POLL_S = 0.2


class OpenSink(Protocol):
    """Where the ranks of one job leave their messages."""

    address: tuple[str, int]
    key: str

    def get(self, timeout: float) -> Message | None: ...
    def stop_ranks(self, reason: str) -> None: ...
    def last_operations(self) -> Mapping[int, str]: ...


MakeSink = Callable[[], AbstractContextManager[OpenSink]]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the driver waits for what should happen by itself. A round's own time-out comes from the track."""

    start_s: float = 300
    """From one rank's hello, or the job's start, to the next."""
    between_s: float = 120
    """From one round, or the last hello, to the next round's begin."""
    margin_s: float = 60
    """Beyond a round's time-out, at which its ranks end by themselves."""
    culprit_s: float = 35
    """For the rank at fault to be found, when others have said that they only follow."""
    others_s: float = 2
    """For a better explanation, once one rank has said that it failed."""
    stop_s: float = 10
    """For stopped ranks to report their stacks."""
    drain_s: float = 1
    """For messages that are still under way when a job has ended."""
    end_s: float = 60
    """For a job to end after its ranks have."""


@dataclass(frozen=True)
class Broken:
    """How a job ended that did not end well."""

    blame: Blame
    last_operations: Mapping[int, str]
    """Of every rank, as far as anything was heard of it."""


class JobRun:
    """Runs one job and hands on what its ranks say."""

    def __init__(
        self,
        *,
        world_size: int,
        round_timeout_s: float,
        patience: Patience,
        on_begin: Callable[[RoundBegun], None],
        on_complete: Callable[[Round], None],
        on_refused: Callable[[CaseRefused], None],
    ) -> None:
        self.attempt = Attempt(world_size)
        self._round_timeout_s = round_timeout_s
        self._patience = patience
        self._on_begin = on_begin
        self._on_complete = on_complete
        self._on_refused = on_refused

    def run(
        self,
        make_job: Callable[[tuple[str, int], str], RankJob],
        placement: Placement,
        *,
        launcher: Launcher,
        make_sink: MakeSink,
    ) -> Broken | None:
        """Start the job, follow it to its end and leave nothing of it; None if it ended well.

        `make_job` is given the sink's address and key.
        """
        with make_sink() as sink:
            try:
                launched = launcher.start(make_job(sink.address, sink.key), placement)
            except Exception as error:
                return Broken(Blame(None, None, "crashed", f"the job could not start: {one_line(error)}"), {})
            try:
                return self._follow(sink, launched)
            finally:
                self._end(sink, launched)

    def _follow(self, sink: OpenSink, launched: Launched) -> Broken | None:
        ending = self._until_over(sink, launched)
        if ending is None:
            return None
        if self.attempt.faults:
            self._collect(sink, self._patience.culprit_s, until=lambda: self.attempt.culprit_is_known)
            self._collect(sink, self._patience.others_s, until=lambda: self.attempt.everyone_has_ended)
        status, reason = ending
        blame = self.attempt.blame(status=status, otherwise=reason)
        sink.stop_ranks(f"stopped, because {blame.reason}")
        self._collect(sink, self._patience.stop_s, until=lambda: self.attempt.everyone_has_ended)
        return Broken(blame, dict(sink.last_operations()))

    def _until_over(self, sink: OpenSink, launched: Launched) -> tuple[Status, str] | None:
        """Take messages until the job is over: None if it ended well, else a status and words for it."""
        heard_s = time.monotonic()
        while True:
            message = sink.get(POLL_S)
            if message is not None:
                heard_s = time.monotonic()
                self._take(message)
                if not self.attempt.faults:
                    continue
            if self.attempt.faults:
                return "crashed", "a rank failed"
            ended = launched.poll()
            if ended is not None:
                self._collect(sink, self._patience.drain_s, until=lambda: self.attempt.ended_well)
                if self.attempt.ended_well:
                    return None
                return "crashed", ended or "the job ended before all of its ranks had"
            if overdue := self._overdue(time.monotonic() - heard_s):
                return None if self.attempt.ended_well else ("timeout", overdue)

    def _overdue(self, silent_s: float) -> str | None:
        """What is overdue after so many seconds without a message, in words; None while nothing is."""
        attempt, wait = self.attempt, self._patience
        if not attempt.everyone_is_there:
            limit = wait.start_s
            what = f"{len(attempt.hellos)} of {attempt.world_size} ranks started, and no other"
        elif attempt.in_a_round:
            limit = self._round_timeout_s + wait.margin_s
            what = f"no rank ended itself at the time-out of {self._round_timeout_s:g} s, nor later"
        elif attempt.ended_well:
            limit, what = wait.end_s, "the job did not end"
        else:
            limit, what = wait.between_s, "no next round began"
        return f"{what} within {limit:g} s" if silent_s > limit else None

    def _collect(self, sink: OpenSink, seconds: float, *, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            message = sink.get(min(POLL_S, left))
            if message is not None:
                self._take(message)

    def _take(self, message: Message) -> None:
        completed = self.attempt.take(message)
        if isinstance(message, RoundBegun):
            self._on_begin(message)
        if isinstance(completed, Round):
            self._on_complete(completed)
        elif completed is not None:
            self._on_refused(completed)

    def _end(self, sink: OpenSink, launched: Launched) -> None:
        """Nothing of the job is left afterwards, whatever happened."""
        try:
            if self.attempt.ended_well:
                launched.wait(self._patience.end_s)
            if launched.poll() is None:
                sink.stop_ranks("the driver ends this job")
        finally:
            launched.stop()


def one_line(error: BaseException) -> str:
    """The last line that an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
