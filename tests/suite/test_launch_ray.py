"""Jobs under Ray Train on an embedded Ray: the real launcher, real ranks and gloo; the loops misbehave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from raybench.suite import processes
from raybench.suite.placement import NodePlacement, NodeShare
from raybench.worker.messages import Farewell, RoundRows
from tests.suite.jobs import _ranks_find_the_tests as _ranks_find_the_tests
from tests.suite.jobs import eventually, play, started, wait_for_hellos

pytestmark = pytest.mark.timeout(240)
TIME_OUTS = (
    "Failed to query Ray Train Controller actor state",
    "Failed to stop PlacementGroupCleaner",
    "Monitor thread did not exit",
    "Torch process group shutdown timed out",
)

UNASKED = (b"log_monitor.py", b"/monitor.py", b"dashboard/dashboard.py", b"AutoscalingCoordinator")
"""What Ray would run on the ranks' cores for nobody."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, _ranks_find_the_tests: None) -> Iterator[Path]:
    """An embedded Ray; the folder of its logs."""
    from raybench.suite.embedded import connect

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with connect() as address:
            assert address is None
            import ray

            yield Path(ray._private.worker._global_node.get_logs_dir_path())
    children = [Path(f"/proc/{p.pid}/cmdline").read_bytes() for p, _ in processes.descendants(os.getpid())]
    assert [line for line in children if b"ray" in line.split(b"\0")[0].rpartition(b"/")[2]] == []


def launcher(loop: str):
    from raybench.suite.launch_ray import RayLauncher

    return RayLauncher(loop=f"tests.worker.loops:{loop}")


def test_job_that_ends_well(logs, capfd):
    import ray

    node = NodeShare(ray.util.get_node_ip_address(), 2, ray.get_runtime_context().get_node_id())
    story = play(
        launcher("finish"),
        NodePlacement.of((node,), cpus_per_rank=0.5, use_gpu=False),
        limit_s=180,
        environment={"RAYBENCH_TEST_VARIABLE": "x"},
    )
    assert story.ending == ""
    assert len(story.of(Farewell)) == 2
    threads = max(1, (os.cpu_count() or 1) // 2)
    for row in story.of(RoundRows):
        assert row.ranks["variable"] == "x"
        assert row.ranks["threads"] == threads
        assert row.ranks["interface"]
        assert row.ranks["in main heap"]
    assert capfd.readouterr() == ("", "")
    text = "".join(p.read_text(errors="replace") for p in logs.rglob("*") if p.is_file())
    assert [words for words in TIME_OUTS if words in text] == []
    running = b" ".join(Path(f"/proc/{p.pid}/cmdline").read_bytes() for p, _ in processes.descendants(os.getpid()))
    assert b"/raylet" in running
    assert [words for words in UNASKED if words in running] == []


def test_killed_rank(logs, capfd):
    story = play(launcher("killed"), limit_s=180)
    assert story.culprits == [1]
    assert story.failures[1].status == "crashed"
    assert story.failures[1].last_operation == "step 3: backward"
    assert story.failures[0].last_operation == "step 3: backward"
    assert story.failures[0].stack
    assert story.ending
    assert "\n" not in story.ending
    assert story.seconds < 30
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_sleep_in_and_outside_a_collective(logs):
    story = play(launcher("sleeps"), limit_s=180, timeout_s=2)
    assert story.failures[1].status == "timeout"
    assert "in sleeps" in story.failures[1].stack
    assert story.failures[0].last_operation == "step 3: all-reduce bucket 2"
    assert "in sleeps" in story.failures[0].stack
    assert story.seconds < 2 + 30


@pytest.mark.slow
def test_stop_ends_everything(logs):
    with started(launcher("waits")) as (sink, launched):
        pids = wait_for_hellos(sink, limit_s=180)
        table = {process.pid: process for process, _ in processes.descendants(os.getpid())}
        ranks = [table[pid] for pid in pids]
        everyone = [*ranks, *(process for rank in ranks for process, _ in processes.descendants(rank.pid))]
        assert len(everyone) == 4  # with their witnesses
        launched.stop()
        assert launched.poll()
        eventually(lambda: not processes.alive(everyone), limit_s=15)
