"""The witness: whatever becomes of a rank, the driver hears of it, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raybench.suite import processes
from raybench.suite.sink import Sink
from raybench.worker import witness
from raybench.worker.messages import Farewell, Hello, RankFailed

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
StartRank = Callable[..., subprocess.Popen]


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink() as sink:
        yield sink


@pytest.fixture
def start(sink: Sink) -> Iterator[StartRank]:
    """Starts a light rank; at the end it and everything that it started must be gone."""
    started: list[subprocess.Popen] = []

    def start(behaviour: str, deadline_s: float = 3600) -> subprocess.Popen:
        host, port = sink.address
        command = [sys.executable, "-m", "tests.worker.light_rank", host, str(port), sink.key]
        rank = subprocess.Popen(
            [*command, behaviour, str(deadline_s)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        started.append(rank)
        return rank

    yield start
    for rank in started:
        rank.kill()
        rank.wait()


def hello(sink: Sink) -> Hello:
    message = sink.get(20)
    assert isinstance(message, Hello)
    return message


def failure(sink: Sink, seconds: float = 20) -> RankFailed:
    message = sink.get(seconds)
    assert isinstance(message, RankFailed), message
    return message


def witness_of(pid: int) -> processes.Process:
    (found,) = [process for process, _ in processes.descendants(pid) if _is_witness(process.pid)]
    return found


def _is_witness(pid: int) -> bool:
    return b"raybench.worker.witness" in Path(f"/proc/{pid}/cmdline").read_bytes()


def assert_ends(process: processes.Process, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while processes.alive([process]):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.05)


def test_clean_end(sink, start):
    rank = start("finish")
    hello(sink)
    assert sink.get(10) == Farewell(1)
    assert rank.wait(10) == 0
    assert sink.get(1) is None


@pytest.mark.parametrize(
    "behaviour", ["be_killed", "exit_at_once", "fork_and_be_killed", "start_a_program_and_be_killed"]
)
def test_death_is_noticed_at_once(sink, start, behaviour):
    rank = start(behaviour)
    pid = hello(sink).pid
    failed = failure(sink, 5)
    assert (failed.status, failed.culprit, failed.case, failed.round) == ("crashed", True, "one", 2)
    assert failed.last_operation == f"step 3: {behaviour}"
    assert failed.reason == f"its process (pid {pid}) ended without a word, as after SIGKILL"
    assert failed.stack == "No stack: the process was gone before it could be asked."
    assert rank.wait(5) in (-signal.SIGKILL, 3)


def test_crash_in_native_code_has_its_stack(sink, start):
    start("crash")
    hello(sink)
    failed = failure(sink)
    assert failed.status == "crashed"
    assert failed.reason.endswith("died: Fatal Python error: Segmentation fault")
    assert "in crash" in failed.stack


def test_error_is_told_by_the_rank_itself(sink, start):
    rank = start("raise_an_error")
    hello(sink)
    failed = failure(sink)
    assert (failed.status, failed.culprit, failed.reason) == ("failed", True, "ValueError: the model is wrong")
    assert "in raise_an_error" in failed.stack
    assert rank.wait(10) == 1
    assert sink.get(1) is None


@pytest.mark.parametrize("behaviour", ["wait", "hold_the_interpreter"])
def test_deadline_ends_a_rank_with_its_stack(sink, start, behaviour):
    rank = start(behaviour, deadline_s=1.0)
    pid = hello(sink).pid
    its_witness = witness_of(pid)
    failed = failure(sink, 6)
    assert (failed.status, failed.culprit) == ("timeout", True)
    assert failed.reason.startswith("the round did not end in time: ")
    assert failed.stack.startswith("Training thread (most recent call first):")
    assert f"in {behaviour}" in failed.stack
    ((seconds, operation),) = failed.history
    assert (operation, seconds >= 1.0) == (f"step 3: {behaviour}", True)
    # A rank without torch has no flight recorder; one that keeps the interpreter's lock cannot be asked.
    assert failed.flight == ("{}" if behaviour == "wait" else None)
    assert rank.wait(5) == -signal.SIGKILL
    assert_ends(its_witness, 5)


def test_deadline_ends_a_stopped_rank_and_says_so(sink, start):
    rank = start("be_stopped", deadline_s=1.0)
    hello(sink)
    failed = failure(sink, 8)
    assert failed.status == "timeout"
    assert failed.stack == "No stack within 2 s: the process is stopped (SIGSTOP)."
    assert rank.wait(5) == -signal.SIGKILL


def test_no_deadline_outside_a_round(sink, start):
    rank = start("finish", deadline_s=-1.0)
    hello(sink)
    assert sink.get(10) == Farewell(1)
    assert rank.wait(10) == 0


def test_order_to_stop(sink, start):
    rank = start("wait")
    pid = hello(sink).pid
    its_witness = witness_of(pid)
    time.sleep(0.3)
    sink.stop_ranks("interrupted")
    failed = failure(sink, 5)
    assert (failed.status, failed.culprit, failed.reason) == ("crashed", False, "interrupted")
    assert "in wait" in failed.stack
    assert rank.wait(5) == -signal.SIGKILL
    assert_ends(its_witness, 5)


def test_rank_found_dead_at_an_order_is_told_as_dead(sink, start):
    rank = start("die_when_asked")
    hello(sink)
    time.sleep(0.5)
    sink.stop_ranks("another rank failed")
    failed = failure(sink, 5)
    assert (failed.status, failed.culprit, failed.last_operation) == ("crashed", True, "step 3: die_when_asked")
    assert "ended without a word" in failed.reason
    assert rank.wait(5) == -signal.SIGUSR1


def test_rank_ends_with_the_sink(sink, start):
    """Whether the driver was killed or only closed its sink is the same to a rank."""
    rank = start("wait")
    its_witness = witness_of(hello(sink).pid)
    sink.close()
    assert rank.wait(5) == -signal.SIGKILL
    assert_ends(its_witness, 5)


def test_stopped_rank_ends_with_the_sink(sink, start):
    rank = start("be_stopped")
    its_witness = witness_of(hello(sink).pid)
    sink.close()
    assert rank.wait(5) == -signal.SIGKILL
    assert_ends(its_witness, 5)


def test_rank_that_cannot_leave_is_ended(sink, start, monkeypatch):
    rank = start("leave_for_ever")
    hello(sink)
    assert sink.get(10) == Farewell(1)
    begin = time.monotonic()
    sink.close()
    assert rank.wait(witness.ORPHAN_S + 5) == -signal.SIGKILL
    assert time.monotonic() - begin > witness.ORPHAN_S - 1


def test_killed_witness_does_not_harm_its_rank_but_is_noticed():
    with Sink(silence_s=2.0) as sink:
        host, port = sink.address
        rank = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.light_rank", host, str(port), sink.key, "wait"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            processes.kill(witness_of(hello(sink).pid))
            message = sink.get(10)
            assert type(message).__name__ == "RankLost"
            assert rank.poll() is None
        finally:
            rank.kill()
            rank.wait()


def test_nothing_is_left_in_temporary_folders(sink, start):
    before = set(Path("/dev/shm").glob("raybench-*"))
    start("be_killed")
    hello(sink)
    failure(sink)
    assert set(Path("/dev/shm").glob("raybench-*")) == before


def test_imports_nothing_heavy():
    """It shares its rank's cores, and starts with every rank."""
    code = "import raybench.worker.witness, sys; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    output = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "pandas", "pydantic", "numpy", "yaml"} & set(output.stdout.split())


DRIVER = """
import subprocess, sys, time
from raybench.suite.sink import Sink
with Sink() as sink:
    host, port = sink.address
    command = [sys.executable, "-m", "tests.worker.light_rank", host, str(port), sink.key]
    ranks = [subprocess.Popen([*command, part], start_new_session=True) for part in ("wait", "be_stopped")]
    hellos = [sink.get(20), sink.get(20)]
    time.sleep(0.3)
    print(*(hello.pid for hello in hellos), flush=True)
    time.sleep(3600)
"""


def test_killed_driver_leaves_nothing():
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert len(driver.stdout.readline().split()) == 2
        everyone = [process for process, _ in processes.descendants(driver.pid)]
        assert len(everyone) == 4
    finally:
        driver.kill()
        driver.communicate()
    for process in everyone:
        assert_ends(process, 6)
