"""What a run says while it runs: a bar on a terminal, plain lines in a log; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TextIO

from raybench.results.schema import Status
from raybench.suite.job import RoundKey

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """Plain lines, for logs. Also keeps count of rounds, so that it can say how long the rest will take."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._left: dict[tuple[str, str], int] = {}
        """Rounds still to come of each track and case."""
        self._round_s: dict[tuple[str, str], float] = {}
        """Seconds that the last round of each track and case took."""
        self._total = 0
        self._begun_s: dict[tuple[str, str, int], float] = {}
        """When each round began that has not ended: a next one's first word may overtake the last one's end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def expect(self, track: str, rounds: Sequence[RoundKey]) -> None:
        """These rounds are to come."""
        for key in rounds:
            place = (track, key.case)
            self._left[place] = self._left.get(place, 0) + 1
        self._total += len(rounds)

    def track_begun(self, track: str, title: str, where: str) -> None:
        self.note(f"{track}: {title} ({where})")

    def round_begun(self, track: str, case: str, round: int) -> None:
        """The first rank of a case says that a round begins; told once."""
        if (track, case, round) not in self._begun_s:
            self._begun_s[track, case, round] = time.monotonic()
            self._show(track, case, round)

    def round_ended(self, track: str, case: str, round: int, tokens_per_s: float | None, gate: str) -> None:
        now = time.monotonic()
        seconds = now - self._begun_s.pop((track, case, round), now)
        self._round_s[track, case] = seconds
        self._take(track, case, 1)
        speed = "" if tokens_per_s is None else f", {tokens_per_s:,.0f} tokens/s"
        checked = "" if gate == "not_run" else f", gate {gate}"
        self._line(f"{track}:{case} round {round}: {seconds:.1f} s{speed}{checked}{self._left_text()}")

    def case_ended(self, track: str, case: str, status: Status, reason: str | None) -> None:
        """A case got another status than ok: none of its rounds is to come any more."""
        self._take(track, case, self._left.get((track, case), 0))
        self._begun_s = {place: begun for place, begun in self._begun_s.items() if place[:2] != (track, case)}
        self._line(f"{track}:{case} {status}: {reason}" if reason else f"{track}:{case} {status}")

    def drop(self, track: str, case: str, num_rounds: int) -> None:
        """Rounds that will not be run."""
        self._take(track, case, num_rounds)

    def note(self, text: str) -> None:
        self._line(text)

    def seconds_left(self) -> float | None:
        """An estimate from the rounds so far, or None before the first."""
        if not self._round_s:
            return None
        usual = sum(self._round_s.values()) / len(self._round_s)
        return sum(number * self._round_s.get(place, usual) for place, number in self._left.items())

    def _take(self, track: str, case: str, number: int) -> None:
        place = (track, case)
        self._left[place] = max(0, self._left.get(place, 0) - number)

    def _left_text(self) -> str:
        left = self.seconds_left()
        return "" if not left else f"; about {_duration(left)} left"

    def _show(self, track: str, case: str, round: int) -> None:
        return

    def _line(self, text: str) -> None:
        with suppress(OSError):  # nobody may be reading any more, such as after `| head`; the run goes on
            print(text, file=self._stream, flush=True)


class TerminalProgress(Progress):
    """A bar with track, case, round and time left below the plain lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        from raybench.suite.console import console_for

        self._console = console_for(self._stream)
        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, left="")

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._bar.stop()

    def _show(self, track: str, case: str, round: int) -> None:
        self._bar.update(self._task, description=f"{track}:{case} round {round}")
        self._update()

    def _take(self, track: str, case: str, number: int) -> None:
        super()._take(track, case, number)
        self._update()

    def _update(self) -> None:
        left = self.seconds_left()
        self._bar.update(
            self._task,
            total=self._total or None,
            completed=self._total - sum(self._left.values()),
            left="" if not left else f"about {_duration(left)} left",
        )

    def _line(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)


def for_stream(stream: TextIO | None = None) -> Progress:
    """A bar where `stream` is a terminal, else plain lines."""
    chosen = stream or sys.stderr
    return TerminalProgress(chosen) if chosen.isatty() else Progress(chosen)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
