"""The second gesture, on a cluster of one node on this machine: `ray job submit [--] raybench …`."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from raybench.suite.guard import VARIABLE, members, sweep
from tests.suite.jobs import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BIN = Path(sys.executable).parent
SMALL = ["run", "a", "--scale", "smoke", "--steps", "2", "--warmup", "1", "--repeats", "1"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a user whose RAY_ADDRESS is a running cluster's dashboard."""
    folder = f"/tmp/rb-{os.getpid()}"
    home = tmp_path_factory.mktemp("home")
    path = f"{BIN}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(home), VARIABLE: folder, "SPT_NOENV": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_JOB_STOP_WAIT_TIME_S"] = "60"  # between asking a stopped job to end, and killing it
    dashboard = free_port()
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"]
    command += [f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(dashboard), limit_s=90)
        yield {**environment, "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        head.terminate()
        sweep(folder)
        head.wait(30)
        assert not members(folder)


def rows_of(output: str, home: str) -> pd.DataFrame:
    """The suite's rows, from where the job's last lines say they are."""
    suite_id, place = re.search(r"suite (\S+): rows in (\S+)", output).groups()
    assert "copy them down: ray rsync-down CLUSTER.yaml '~/raybench/results/' results/" in output
    assert Path(place) == Path(home) / "raybench" / "results"
    runs = pd.read_parquet(Path(place) / "runs")
    return runs[runs.suite_id == suite_id]


def test_submitted_suite_leaves_rows_where_its_last_lines_say(cluster, tmp_path):
    command = [BIN / "ray", "job", "submit", "--", "raybench", *SMALL]
    done = subprocess.run(command, env=cluster, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = rows_of(done.stdout, cluster["HOME"])
    assert set(rows.status) == {"ok"}
    assert set(rows.gate) == {"passed"}


def test_without_separator_and_stopped_under_way(cluster, tmp_path):
    """Options of raybench need the `--`, since `ray job submit` takes them for its own; without any, none is needed."""

    def job(*command: str) -> str:
        return subprocess.run(
            [BIN / "ray", "job", *command], env=cluster, cwd=tmp_path, capture_output=True, text=True, timeout=300
        ).stdout

    job("submit", "--no-wait", "--submission-id", "plain", "raybench", "run-all")
    eventually(lambda: "gate passed" in job("logs", "plain"), limit_s=240)
    job("stop", "plain")
    eventually(lambda: "copy them down" in job("logs", "plain"), limit_s=90)
    rows = rows_of(job("logs", "plain"), cluster["HOME"])
    assert "ok" in set(rows.status)
    assert set(rows.query("status != 'ok'").reason) == {"interrupted"}
