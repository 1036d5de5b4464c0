"""Jobs under torchrun: the real launcher, real ranks and gloo; the loops misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raybench.suite import processes
from raybench.suite.launch_torchrun import TorchrunLauncher
from raybench.suite.placement import Placement
from raybench.suite.sink import Sink
from raybench.worker.messages import Farewell, RoundRows
from tests.suite.jobs import ROOT, eventually, make_job, play, started, wait_for_hellos
from tests.suite.jobs import _ranks_find_the_tests as _ranks_find_the_tests

pytestmark = pytest.mark.timeout(120)


def launcher(loop: str) -> TorchrunLauncher:
    return TorchrunLauncher(loop=f"tests.worker.loops:{loop}")


def test_job_that_ends_well():
    story = play(launcher("finish"), environment={"RAYBENCH_TEST_VARIABLE": "x", "OMP_NUM_THREADS": "3"})
    assert story.ending == ""
    assert len(story.of(Farewell)) == 2
    rows = [m.ranks for m in story.of(RoundRows)]
    assert rows == [{"threads": 3, "interface": "lo", "variable": "x", "in main heap": True}] * 2


def test_killed_rank():
    story = play(launcher("killed"))
    assert story.culprits == [1]
    assert story.failures[1].status == "crashed"
    assert story.failures[1].last_operation == "step 3: backward"
    assert story.failures[0].stack
    assert story.seconds < 15
    assert story.ending


def test_sleep_in_and_outside_a_collective():
    story = play(launcher("sleeps"), timeout_s=2)
    assert story.failures[1].status == "timeout"
    assert story.failures[1].last_operation == "step 3: optimizer"
    assert story.failures[0].last_operation == "step 3: all-reduce bucket 2"
    assert "in sleeps" in story.failures[0].stack
    assert "in sleeps" in story.failures[1].stack
    assert story.seconds < 2 + 15


@pytest.mark.slow
def test_ranks_that_cannot_reach_the_sink_end_by_themselves():
    with Sink() as sink:
        job = make_job(sink).model_copy(update={"sink_key": "00" * 32})
        launched = launcher("finish").start(job, Placement(num_ranks=2))
        try:
            ending = launched.wait(60)
            assert ending.startswith("torchrun ended with exit code 1: ")
            assert "SinkLostError: the driver at 127.0.0.1:" in ending
            assert "refused this rank's key" in ending
        finally:
            launched.stop()
        assert launched.poll() == ending


def test_stop_ends_everything():
    with started(launcher("waits")) as (sink, launched):
        wait_for_hellos(sink)
        everyone = [process for process, _ in processes.descendants(os.getpid())]
        assert len([p for p in everyone if _runs(p.pid, "raybench.worker.witness")]) == 2
        launched.stop()
        assert launched.poll()
        assert [p for p in processes.alive(everyone) if _runs(p.pid, "raybench.worker")] == []
        assert not launched._folder.exists()


DRIVER = """
import time
from raybench.suite.launch_torchrun import TorchrunLauncher
from raybench.suite.placement import Placement
from tests.suite.jobs import started, wait_for_hellos
with started(TorchrunLauncher(loop="tests.worker.loops:waits")) as (sink, launched):
    wait_for_hellos(sink)
    print("all there", flush=True)
    time.sleep(3600)
"""


def test_killed_driver_leaves_nothing():
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout.readline().strip() == "all there"
        everyone = [process for process, _ in processes.descendants(driver.pid)]
        assert len(everyone) == 5  # torchrun, its ranks, their witnesses
    finally:
        driver.kill()
        driver.communicate()
    eventually(lambda: not processes.alive(everyone), limit_s=10)


def _runs(pid: int, module: str) -> bool:
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
