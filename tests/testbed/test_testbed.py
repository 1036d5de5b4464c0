"""The testbed itself: hosts that are apart, links that obey, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.testbed.bed import Testbed
from tests.testbed.host import REPOSITORY, Host
from tests.testbed.streams import streams

pytestmark = pytest.mark.netns


def stream(sender: Host, receiver: Host, megabytes: int) -> float:
    """Mbit/s of one TCP stream."""
    return streams((sender, receiver), megabytes=megabytes)[0] * 8 / 1e6


def test_hosts_are_apart(bed: Testbed) -> None:
    one, two = bed.add_host("one"), bed.add_host("two")
    one.run("touch", "/tmp/mine", "/etc/mine", f"/home/{one.user}/mine")
    assert two.run("ls", "/tmp", "/home/ubuntu").stdout.count("mine") == 0
    assert not Path("/etc/mine").exists()
    assert one.run("hostname").stdout.strip() == "one"
    assert one.processes() == []
    ssh = ["ssh", "-o", "StrictHostKeyChecking=no", f"{one.user}@{one.external_ip}"]
    assert bed.laptop.run(*ssh, "id -un && sudo -n id -u").stdout.split() == [one.user, "0"]
    outside = one.run("bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80", check=False, timeout=20)
    assert outside.returncode != 0


def test_a_shaped_link_obeys_and_is_lifted(bed: Testbed) -> None:
    one, two = bed.add_host("one"), bed.add_host("two")
    one.shape("200mbit")
    before = one.bytes_sent()
    shaped = stream(one, two, 40)
    assert 0.85 * 200 < shaped < 1.1 * 200  # a burst of 1 MB goes ahead
    assert one.bytes_sent() - before > 40 << 20
    one.shape(None)
    assert stream(one, two, 40) > 2 * shaped


def test_pulling_the_plug(bed: Testbed) -> None:
    host = bed.add_host("one")
    process = subprocess.Popen(host.namespace.enter(["sleep", "600"]))
    bed.pull("one")
    assert not host.alive
    assert process.wait(timeout=10) != 0


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    script = (
        "import time\n"
        "from tests.testbed.bed import Testbed\n"
        "bed = Testbed()\n"
        "host = bed.add_host('one')\n"
        "print(bed.switch.pid, bed.laptop.namespace.pid, host.namespace.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "veth" not in links
    assert "port1" not in links
    assert not list(Path(tempfile.gettempdir()).glob(f"testbed-*-{owner.pid}-*"))


def test_nothing_is_left_when_closed() -> None:
    mounts = Path("/proc/self/mounts").read_text()
    with Testbed() as bed:
        host = bed.add_host("one")
        pids = [bed.switch.pid, bed.laptop.namespace.pid, host.namespace.pid]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert Path("/proc/self/mounts").read_text() == mounts
