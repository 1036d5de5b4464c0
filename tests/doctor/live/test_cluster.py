"""The doctor on real hosts with Ray over both: nothing is wrong, then many things are, and each is found and named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raybench.suite.nccl_env import resolve
from tests.clusters.conftest import require_testbed
from tests.testbed.bed import Testbed
from tests.testbed.host import REPOSITORY, Host

HOME = "/root"
NODE_MANAGER, OBJECT_MANAGER = 7001, 7002
Said = dict[str, Any]


def environment(**more: str) -> dict[str, str]:
    """Of Ray, whose processes inherit it, and of the doctor."""
    path = f"{sys.prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    base = {"PATH": path, "HOME": HOME, "PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    return {**base, "PYTHONDONTWRITEBYTECODE": "1", **more}


class Pair:
    """Two hosts with Ray on them."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.head, self.worker = bed.add_host("rack-1"), bed.add_host("rack-2")
        self.address = f"{self.head.internal_ip}:6379"
        for host in (self.head, self.worker):
            host.run("iptables", "-F", "INPUT")
        self._start(self.head, "--head", "--port=6379", "--include-dashboard=false")
        self.start_worker()

    def start_worker(self, **more: str) -> None:
        self._start(self.worker, f"--address={self.address}", **more)

    def stop_worker(self) -> None:
        """In its PID namespace there is no other Ray."""
        self.worker.run("ray", "stop", env=environment(), timeout=120)

    def doctor(self) -> Said:
        """The answer of `raybench doctor --json`, with what it took and the file that it wrote."""
        begin = time.monotonic()
        command = [sys.executable, "-m", "raybench", "doctor", "--json", "-o", f"{HOME}/mine.env"]
        done = self.head.run(*command, env=environment(RAY_ADDRESS=self.address), cwd=HOME, timeout=400, check=False)
        assert done.stdout, done.stderr
        body: Said = json.loads(done.stdout)
        assert body["exit_code"] == done.returncode
        print(f"{time.monotonic() - begin:.0f} s: {body.get('verdict', body['errors'])}\n{done.stderr}")
        return {**body, "file": self.head.namespace.path(f"{HOME}/mine.env").read_text()}

    @staticmethod
    def _start(host: Host, *arguments: str, **more: str) -> None:
        ports = [f"--node-manager-port={NODE_MANAGER}", f"--object-manager-port={OBJECT_MANAGER}"]
        options = [f"--node-ip-address={host.internal_ip}", "--num-cpus=2", "--object-store-memory=100000000", *ports]
        host.run("ray", "start", *options, *arguments, env=environment(**more), cwd=HOME, timeout=180)


def break_worker(pair: Pair) -> None:
    """Another torch, a clock 5 s ahead, a small /dev/shm, interfaces that are none or lead nowhere, a slow link."""
    worker = pair.worker
    pair.stop_worker()
    worker.namespace.sh(
        f"""
        mkdir -p {HOME}/other/torch-2.9.0.dist-info
        printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: 2.9.0\\n' > {HOME}/other/torch-2.9.0.dist-info/METADATA
        ip link add stray0 type veth peer name stray1
        ip addr add 192.168.99.2/24 dev stray0
        ip link set stray0 up
        ip link set stray1 up
        """
    )
    pair.start_worker(
        PYTHONPATH=f"{HOME}/other:{REPOSITORY}",
        LD_PRELOAD=str(next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))),
        FAKETIME="+5s",
        GLOO_SOCKET_IFNAME="nosuch0",
        NCCL_SOCKET_IFNAME="stray0",
    )
    worker.run("mount", "-o", "remount,size=64m", "/dev/shm")
    worker.shape("100mbit")


def mend_worker(pair: Pair) -> None:
    pair.stop_worker()
    pair.worker.run("mount", "-o", "remount,size=3g", "/dev/shm")
    pair.worker.shape(None)
    pair.start_worker()


def block_ports(pair: Pair) -> None:
    """What a security group does that knows only of Ray's own ports, and on the worker not of all of these."""
    for host, other in ((pair.worker, pair.head), (pair.head, pair.worker)):
        rule = ["iptables", "-I", "INPUT", "-p", "tcp", "-s", other.internal_ip, "-m", "state", "--state", "NEW"]
        for ports in ("32768:60999", *([str(OBJECT_MANAGER)] if host is pair.worker else [])):
            host.run(*rule, "--dport", ports, "-j", "DROP")


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """What the doctor says of one pair of hosts in turn: well, broken, with closed ports, with a node that is gone."""
    require_testbed("faketime")
    with Testbed() as bed:
        pair = Pair(bed)
        answers: dict[str, Any] = {"head": pair.head.internal_ip, "worker": pair.worker.internal_ip}
        answers["well"] = pair.doctor()
        break_worker(pair)
        answers["broken"] = pair.doctor()
        mend_worker(pair)
        block_ports(pair)
        answers["closed"] = pair.doctor()
        bed.pull("rack-2")
        answers["gone"] = pair.doctor()
        yield answers


pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(1500)]


def finding(said: Said, code: str) -> Said:
    (found,) = [each for each in said["findings"] if each["code"] == code]
    return found  # type: ignore[no-any-return]


def test_a_clean_cluster_gives_no_finding(told: dict[str, Any], tmp_path: Path):
    well = told["well"]
    assert (well["exit_code"], well["findings"]) == (0, [])
    assert well["verdict"].startswith("Ready (2 nodes)")
    assert [node["address"] for node in well["nodes"]] == [told["head"], told["worker"]]
    assert {node["ray_interface"] for node in well["nodes"]} == {"eth0"}
    assert {each["status"] for each in well["collectives"]} == {"ok"}
    assert [each["stage"] for each in well["collectives"]] == ["within", "within", "between", "all"]
    assert len(well["reaches"]) == len(well["streams"]) == 2
    assert all(how == "ok" for each in well["reaches"] for how in each["ports"].values())
    assert any("no node has a GPU" in each for each in well["skipped"])
    assert abs(well["nodes"][1]["clock_offset_ns"]) <= well["nodes"][1]["clock_error_ns"] + 1_000_000
    file = tmp_path / "mine.env"
    file.write_text(well["file"])
    assert resolve(str(file)) == well["environment"] == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def test_another_torch_is_named(told: dict[str, Any]):
    found = finding(told["broken"], "mixed-versions")
    assert found["message"].startswith("torch differs between nodes: ")
    assert f"2.9.0 on {told['worker']}" in found["message"]
    assert told["broken"]["exit_code"] == 1


def test_a_small_shm_is_named(told: dict[str, Any]):
    found = finding(told["broken"], "shm-too-small")
    assert found["nodes"] == [told["worker"]]
    assert "64 MiB" in found["message"]


def test_a_clock_that_is_off_is_named(told: dict[str, Any]):
    found = finding(told["broken"], "clock-offset")
    assert found["nodes"] == [told["worker"]]
    offset = told["broken"]["nodes"][1]["clock_offset_ns"]
    assert offset == pytest.approx(5e9, abs=told["broken"]["nodes"][1]["clock_error_ns"] + 5e6)


def test_a_shaped_link_is_named_with_its_direction(told: dict[str, Any]):
    found = finding(told["broken"], "slow-link")
    assert found["message"].startswith(f"From {told['worker']} to {told['head']} the network carries ")
    (slow,) = [each for each in told["broken"]["streams"] if each["source"] == told["worker"]]
    assert slow["bits_per_s"] == pytest.approx(95.7e6, rel=0.1), "100 Mbit/s less its headers"


def test_a_wrong_interface_is_named_and_mended(told: dict[str, Any]):
    missing, wrong = finding(told["broken"], "interface-not-found"), finding(told["broken"], "wrong-interface")
    assert missing["nodes"] == wrong["nodes"] == [told["worker"]]
    assert "no interface that is up and has an address answers to 'nosuch0'" in missing["message"]
    assert "stray0 (192.168.99.2)" in wrong["message"]
    assert missing["environment"] == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert wrong["environment"] == {"NCCL_SOCKET_IFNAME": "=eth0"}
    failed = [each for each in told["broken"]["findings"] if each["code"].startswith("collective-")]
    assert failed
    assert all("interface-not-found" in each["message"] for each in failed)


def test_nothing_else_is_said_of_the_broken_host(told: dict[str, Any]):
    codes = {each["code"] for each in told["broken"]["findings"]} - {"collective-failed", "collective-timeout"}
    assert codes == {
        "mixed-versions",
        "shm-too-small",
        "clock-offset",
        "slow-link",
        "interface-not-found",
        "wrong-interface",
    }


def test_blocked_ports_are_named_with_their_direction(told: dict[str, Any]):
    closed, head, worker = told["closed"], told["head"], told["worker"]
    there, back = [each for each in closed["findings"] if each["code"] == "connection-timeout"]
    assert there["message"].startswith(
        f"From {head} to {worker} a TCP connection to port {OBJECT_MANAGER} (Ray's object manager)"
    )
    assert back["message"].startswith(f"From {worker} to {head} a TCP connection to port ")
    assert str(OBJECT_MANAGER) not in back["message"]
    for each, fixed in zip(closed["reaches"], ({NODE_MANAGER}, {NODE_MANAGER, OBJECT_MANAGER, 6379}), strict=True):
        assert {int(port) for port, how in each["ports"].items() if how == "ok"} - {29500} == fixed
    assert closed["verdict"].startswith("Not ready (2 nodes): connection-timeout.")


def test_an_all_reduce_that_hangs_is_ended_and_traced_back(told: dict[str, Any]):
    within, between = (
        {each["status"] for each in told["closed"]["collectives"] if each["stage"] == stage}
        for stage in ("within", "between")
    )
    assert (within, between & {"ok"}) == ({"ok"}, set())
    assert between
    assert any("all ranks" in each for each in told["closed"]["skipped"])
    failed = next(each for each in told["closed"]["findings"] if each["code"].startswith("collective-"))
    assert "Most likely because of connection-timeout" in failed["message"]


def test_a_node_that_is_gone_is_a_finding_and_no_hang(told: dict[str, Any]):
    gone = told["gone"]
    (found,) = [each for each in gone["findings"] if each["code"] in ("node-no-answer", "node-lost")]
    assert found["nodes"] == [told["worker"]]
    assert [node["address"] for node in gone["nodes"]] == [told["head"]]
    assert [each["status"] for each in gone["collectives"]] == ["ok"]
