"""nsys around Ray's workers: what stands on PATH in its place says how it was started, and writes as late as it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raybench.errors import RequestError
from raybench.suite.catalog import parse_targets
from raybench.suite.placement import NodePlacement, NodeShare
from raybench.suite.request import Request
from raybench.suite.session import connected, nsys_folder, prepare
from raybench.worker.messages import Farewell
from tests.suite.jobs import NUM_RANKS, play
from tests.suite.jobs import _ranks_find_the_tests as _ranks_find_the_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
NSYS = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 0 ]; do
    case "$1" in
        profile|--*) shift ;;
        -o) report="$2"; shift 2 ;;
        -*) shift 2 ;;
        *) break ;;
    esac
done
"$@"
code=$?
sleep 1
echo "a report" > "$report.$$.nsys-rep"
exit $code
"""
SETTINGS = "profile -t cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=repeat --kill=none -o"
"""In whatever order Ray gives them."""


@pytest.fixture
def request_of_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _ranks_find_the_tests: None) -> Iterator[Request]:
    """A request with --nsys, and a folder for Ray whose name is short enough for its sockets."""
    folder = tempfile.mkdtemp(prefix="nsys-")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_process_group_cleanup_enabled", "0")  # as a run of its own would leave it
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield Request(targets=tuple(parse_targets(["a"])), results=str(tmp_path / "results"), with_nsys=True)
    shutil.rmtree(folder, ignore_errors=True)


def run_job():
    import ray

    from raybench.suite.launch_ray import RayLauncher

    node = NodeShare(ray.util.get_node_ip_address(), NUM_RANKS, ray.get_runtime_context().get_node_id())
    placement = NodePlacement.of((node,), cpus_per_rank=0.5, use_gpu=False)
    return play(RayLauncher(loop="tests.worker.loops:finish"), placement, limit_s=180, with_nsys=True)


def test_workers_are_wrapped_and_reports_are_kept(request_of_nsys, tmp_path):
    log, nsys = tmp_path / "log", tmp_path / "nsys"
    nsys.write_text(NSYS.format(log=log))
    nsys.chmod(0o755)
    request_of_nsys.check()
    with connected(request_of_nsys) as cluster:
        story = run_job()
        folder = nsys_folder()
        with pytest.raises(RequestError, match="--nsys: this cluster has no GPU"):
            prepare(request_of_nsys, cluster)
    assert (story.ending, len(story.of(Farewell))) == ("", NUM_RANKS)
    workers = [line for line in log.read_text().splitlines() if "default_worker.py" in line]
    assert len(workers) >= NUM_RANKS
    for line in workers:
        options, _, script = line.partition(" python ")
        assert sorted(options.split()) == sorted([*SETTINGS.split(), f"{folder}/raybench_%h_%p"])
        assert "-t cuda,nvtx" in options
        assert f"-o {folder}/" in options
        assert script.split()[0].endswith("default_worker.py")
    assert len(list(folder.glob("raybench_*.nsys-rep"))) >= NUM_RANKS


def test_a_node_without_nsys_ends_the_job_in_one_message(request_of_nsys):
    with pytest.raises(RequestError, match="--nsys: no nsys on PATH"):
        request_of_nsys.check()
    with connected(request_of_nsys):
        story = run_job()
    assert "nsight is not installed" in story.ending
    assert "\n" not in story.ending
