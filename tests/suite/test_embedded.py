"""Which Ray the driver uses, and that nothing of its own Ray outlives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raybench.errors import RequestError
from raybench.suite import processes
from raybench.suite.embedded import connect
from tests.suite.jobs import ROOT, eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_dead_cluster_is_refused_at_once(dead_address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", dead_address)
    begin = time.monotonic()
    with pytest.raises(RequestError, match=f"RAY_ADDRESS: no Ray answers at '{dead_address}'"), connect():
        pass
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://head:10001", "head", "head:port", ":6379"])
def test_other_forms_are_refused(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RequestError, match=r"RAY_ADDRESS: .* cannot be joined \(allowed: "), connect():
        pass


def test_something_else_at_the_address_is_refused_in_bounded_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.raises(RequestError, match="RAY_ADDRESS: "), connect():
            pass
        assert time.monotonic() - begin < 15


DRIVER = """
import os, time
from raybench.suite.embedded import connect
try:
    with connect():
        import ray

        address = ray.get_runtime_context().gcs_address
        print("connected", os.environ["RAYBENCH_EMBEDDED_RAY"], address, sep="\\n", flush=True)
        time.sleep(3600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
    ids=lambda how: how.name,
)
def test_embedded_ray_ends_with_its_driver(how, monkeypatch):
    """Ctrl-C on a terminal goes to the whole process group."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    everyone: list[processes.Process] = []
    try:
        assert driver.stdout.readline() == "connected\n"
        everyone = [process for process, _ in processes.descendants(driver.pid)]
        assert len(everyone) > 2
        folder = driver.stdout.readline().strip()
        assert Path(folder).is_dir()
        driver.stdout.readline()
        os.killpg(driver.pid, how) if how is signal.SIGINT else driver.send_signal(how)
        output, errors = driver.communicate(timeout=30)
        assert output == ("interrupted\n" if how is signal.SIGINT else "")
        assert errors == ""
        eventually(lambda: not processes.alive(everyone), limit_s=10)
        eventually(lambda: not Path(folder).exists(), limit_s=10)
    finally:
        driver.kill()
        driver.wait()
        for process in everyone:
            processes.kill(process)


GUEST = """
from raybench.suite.embedded import connect
from raybench.suite.launch_ray import RayLauncher
from tests.suite.jobs import play
with connect() as address:
    story = play(RayLauncher(loop="tests.worker.loops:finish"), limit_s=180)
    print(address, repr(story.ending), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_cluster_that_was_joined_stays(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    owner = subprocess.Popen([sys.executable, "-c", DRIVER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "connected\n"
        owner.stdout.readline()
        address = owner.stdout.readline().strip()
        everyone = [p for p, _ in processes.descendants(owner.pid) if not _is_worker(p.pid)]
        monkeypatch.setenv("RAY_ADDRESS", address)
        guest = subprocess.run(
            [sys.executable, "-c", GUEST], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )
        assert guest.stdout == f"{address} ''\n"
        assert guest.stderr == ""
        assert processes.alive(everyone) == everyone
    finally:
        owner.kill()
        owner.communicate()


def _is_worker(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::IDLE")
