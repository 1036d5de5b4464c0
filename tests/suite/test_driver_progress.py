"""What a run says: plain lines in a log, a bar on a terminal, and nothing that could end the run."""

from __future__ import annotations

import io

import pytest

from raybench.suite.job import RoundKey
from raybench.suite.progress import Progress, TerminalProgress, for_stream

ROUNDS = [RoundKey(case=case, round=number) for number in (1, 2) for case in ("one", "two")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def tell(progress: Progress) -> None:
    with progress:
        progress.expect("t", ROUNDS)
        progress.track_begun("t", "Title", "2 ranks")
        progress.round_begun("t", "one", 1)
        progress.round_begun("t", "one", 1)
        progress.round_ended("t", "one", 1, 1234.5, "passed")
        progress.round_begun("t", "two", 1)
        progress.case_ended("t", "two", "crashed", "[bold]it did[/]")
        progress.drop("t", "one", 1)
        progress.note("[red]that was all")


LINES = [
    "t: Title (2 ranks)",
    "t:one round 1: 0.0 s, 1,234 tokens/s, gate passed; about 1 s left",
    "t:two crashed: [bold]it did[/]",
    "[red]that was all",
]


def test_a_log_has_plain_lines():
    log = io.StringIO()
    progress = for_stream(log)
    assert type(progress) is Progress
    tell(progress)
    assert log.getvalue().splitlines() == LINES
    assert progress.seconds_left() == 0


def test_a_terminal_has_the_same_lines_above_a_bar(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    progress = for_stream(terminal)
    assert isinstance(progress, TerminalProgress)
    tell(progress)
    for line in LINES:
        assert line in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


@pytest.mark.parametrize("kind", [Progress, TerminalProgress])
def test_a_reader_that_went_away_does_not_end_the_run(kind: type[Progress]):
    tell(kind(Closed()))


def test_time_left_is_what_the_last_rounds_took(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(io.StringIO())
    progress.expect("t", ROUNDS)
    progress.expect("u", ROUNDS[:1])
    assert progress.seconds_left() is None
    for case, seconds in (("one", 10.0), ("two", 20.0)):
        progress.round_begun("t", case, 1)
        now[0] += seconds
        progress.round_ended("t", case, 1, None, "not_run")
    assert progress.seconds_left() == 10 + 20 + 15


def test_a_round_that_begins_before_the_last_one_ended_is_timed_from_its_own_beginning(monkeypatch):
    clock = iter([10.0, 13.0, 14.0, 18.0])
    monkeypatch.setattr("raybench.suite.progress.time.monotonic", lambda: next(clock))
    log = io.StringIO()
    progress = Progress(log)
    progress.expect("t", ROUNDS)
    progress.round_begun("t", "one", 1)
    progress.round_begun("t", "two", 1)
    progress.round_ended("t", "one", 1, None, "passed")
    progress.round_ended("t", "two", 1, None, "passed")
    assert "one round 1: 4.0 s" in log.getvalue()
    assert "two round 1: 5.0 s" in log.getvalue()
