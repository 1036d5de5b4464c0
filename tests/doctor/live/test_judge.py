"""Judging: a cluster that is well has no finding; each fault is found, named with its node, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raybench.doctor.findings import SEVERITY
from raybench.doctor.live.facts import Examination
from raybench.doctor.live.judge import judge, verdict
from raybench.doctor.live.judge_network import clock_offsets
from tests.doctor.live.made import GIB, collective, examination, gpu, interface, node, reach, stream

ONE, TWO, THREE = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def second(**changes: Any) -> Examination:
    """Two nodes, of which the second is changed."""
    return examination(node(ONE), node(TWO, **changes))


def test_a_cluster_that_is_well_has_no_finding():
    found = examination()
    assert judge(found) == []
    assert verdict(found, []) == "Ready (2 nodes): nothing wrong was found, and 3 all-reduces worked."


def test_what_was_tried_is_no_risk_any_more():
    (untried,) = judge(examination(node(), collectives=[]))
    assert (untried["code"], untried["environment"]) == ("p2p-hang-risk", {})
    assert judge(examination(node())) == []


def silent() -> Examination:
    return examination(node(ONE), silent={TWO: "gave no answer in 60 s; from here its node manager (port 1) timeout"})


def blocked() -> Examination:
    ports = {6379: "ok", 40001: "timeout", 50001: "timeout"}
    return examination(reaches=[reach(ONE, TWO), reach(TWO, ONE, ports=ports, answered_by=None, round_trip_ns=None)])


def refused() -> Examination:
    return examination(reaches=[reach(ONE, TWO, ports={6379: "refused", 40001: "ok"}), reach(TWO, ONE)])


def rejected() -> Examination:
    return examination(reaches=[reach(ONE, TWO, ports={6379: "ok", 40001: "unreachable"}), reach(TWO, ONE)])


def no_such_interface() -> Examination:
    return second(environment={"NCCL_SOCKET_IFNAME": "ens", "GLOO_SOCKET_IFNAME": "eth0"})


def no_such_gloo_interface() -> Examination:
    return second(environment={"GLOO_SOCKET_IFNAME": "eth0,eth9"})


def docker() -> Examination:
    """Both hosts have a docker0 of the same address: each reaches itself there."""
    inner = interface("docker0", "172.17.0.1", claimed_mbps=None)
    found = second(environment={"NCCL_SOCKET_IFNAME": "docker0"}, interfaces=[inner, interface(address=TWO)])
    return {**found, "reaches": [*found["reaches"], reach(ONE, TWO, at="172.17.0.1", answered_by=ONE)]}


def stray() -> Examination:
    away = interface("eth1", "192.168.5.2")
    found = second(environment={"GLOO_SOCKET_IFNAME": "eth1"}, interfaces=[away, interface(address=TWO)])
    dead = reach(ONE, TWO, at="192.168.5.2", answered_by=None, ports={40001: "timeout"})
    return {**found, "reaches": [*found["reaches"], dead]}


def late_clock() -> Examination:
    return examination(reaches=[reach(ONE, TWO, offset_ns=5_000_000_000), reach(TWO, ONE, offset_ns=-5_000_000_000)])


def slow_by_claim() -> Examination:
    return examination(streams=[stream(ONE, TWO, 8), stream(TWO, ONE, 8)])


def slow_by_others() -> Examination:
    nodes = [node(each, interfaces=[interface(address=each, claimed_mbps=None)]) for each in (ONE, TWO)]
    return examination(*nodes, streams=[stream(ONE, TWO, 20), stream(TWO, ONE, 6)])


def slow_at_all() -> Examination:
    nodes = [node(each, interfaces=[interface(address=each, claimed_mbps=None)]) for each in (ONE, TWO)]
    return examination(*nodes, streams=[stream(ONE, TWO, 0.0957), stream(TWO, ONE, 0.0957)])


def hang_within() -> Examination:
    hung = collective("within", TWO, TWO, status="timeout", duration_ns=None, reason="rank 0 gave no answer in 130 s")
    return {**second(acs_bridges=["0000:00:01.0"]), "collectives": [collective("within", ONE, ONE), hung]}


def failed_between() -> Examination:
    log = "h:1:1 [0] x.cc:1 NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129\n"
    broken = collective("between", ONE, TWO, status="failed", duration_ns=None, reason="rank 1 failed (x)", log=log)
    found = examination()
    return {**found, "collectives": [*found["collectives"][:2], broken]}


FULL = {"used_bytes": 9 * GIB, "processes": ["pid 4711 python 9000 MiB"]}
IB = {"name": "mlx5_0:1", "is_active": True, "link_layer": "Ethernet", "rate": "100 Gb/sec"}
FAULTS: list[tuple[str, Callable[[], Examination], set[str], str]] = [
    ("a node is silent", silent, {"node-no-answer"}, "10.0.0.2 gave no answer in 60 s; from here"),
    ("a node was lost", lambda: examination(lost=[THREE]), {"node-lost"}, THREE),
    (
        "a blocked port",
        blocked,
        {"connection-timeout"},
        "From 10.0.0.2 to 10.0.0.1 a TCP connection to port 40001, 50001",
    ),
    ("a refused port", refused, {"connection-refused"}, "port 6379 (Ray's control service)"),
    ("a rejected port", rejected, {"peer-unreachable"}, "The other 1 of 2 ports tried answer"),
    ("no such interface", no_such_interface, {"interface-not-found"}, "NCCL_SOCKET_IFNAME is 'ens' on 10.0.0.2"),
    ("no such gloo interface", no_such_gloo_interface, {"interface-not-found"}, "answers to 'eth9'"),
    ("docker0", docker, {"wrong-interface"}, "docker0 (172.17.0.1): 10.0.0.1 reaches itself there"),
    ("a stray interface", stray, {"wrong-interface"}, "eth1 (192.168.5.2): 10.0.0.1 gets no answer there"),
    ("torch", lambda: second(versions={"torch": "2.9.0"}), {"mixed-versions"}, "2.9.0 on 10.0.0.2"),
    ("NCCL", lambda: second(versions={"nccl": "2.21.5"}), {"mixed-versions"}, "nccl differs between nodes"),
    ("the driver", lambda: second(versions={"driver": "535.183.01"}), {"driver-differs"}, "535.183.01 on 10.0.0.2"),
    ("an old driver", lambda: second(versions={"driver_cuda": "11.8"}), {"driver-too-old"}, "CUDA 11.8 at most"),
    ("torch for CPUs", lambda: second(versions={"cuda": None, "nccl": None}), {"torch-without-cuda"}, "without CUDA"),
    ("shm", lambda: second(shm_bytes=64 << 20, shm_free_bytes=64 << 20), {"shm-too-small"}, "/dev/shm has 64 MiB"),
    ("full shm", lambda: second(shm_free_bytes=1 << 20), {"shm-too-small"}, "is full: 1 MiB of 240 GiB free"),
    ("memlock", lambda: second(rdma=[IB]), {"memlock-too-low"}, "may lock 8 MiB"),
    (
        "memory",
        lambda: second(limits={"memory_bytes": 4 * GIB, "memory_used_bytes": 3 * GIB}),
        {"container-limit"},
        "few memory: 1 GiB of 4 GiB left",
    ),
    ("CPUs", lambda: second(limits={"cpus": 4.0}), {"container-limit"}, "few CPUs: 4, and Ray gives away 60"),
    ("pids", lambda: second(limits={"pids": 256, "pids_used": 56}), {"container-limit"}, "few processes: 200 of 256"),
    ("settings", lambda: second(environment={"NCCL_ALGO": "Ring"}), {"environment-differs"}, "NCCL_ALGO differs"),
    ("the clock", late_clock, {"clock-offset"}, "The clock of 10.0.0.2 is 5.000 s ahead of 10.0.0.1"),
    ("slow by its claim", slow_by_claim, {"slow-link"}, "carries 8 Gbit/s, and its interfaces claim 50 Gbit/s"),
    ("slow by others", slow_by_others, {"slow-link"}, "the links of this cluster carry 20 Gbit/s"),
    ("slow at all", slow_at_all, {"slow-link"}, "carries 95.7 Mbit/s, and training needs 0.5 Gbit/s"),
    ("MTU", lambda: second(interfaces=[interface(address=TWO, mtu=1500)]), {"mtu-differs"}, "1500 on 10.0.0.2"),
    (
        "fewer GPUs",
        lambda: second(gpus=[gpu()], ray_gpus=1, num_pci_gpus=1, topology=None),
        {"gpus-differ"},
        "1 × NVIDIA A10",
    ),
    ("GPU off the bus", lambda: second(num_pci_gpus=3), {"driver-not-working"}, "has 3 NVIDIA GPUs on its PCI bus"),
    ("Ray believes", lambda: second(ray_gpus=4), {"gpu-missing"}, "Ray gives away 4 GPUs"),
    (
        "in use",
        lambda: second(gpus=[gpu(0), gpu(1, **FULL)]),
        {"gpu-in-use"},
        "GPU 1 (NVIDIA A10) has 9 GiB of 22.5 GiB in use by pid",
    ),
    ("ECC", lambda: second(gpus=[gpu(0, uncorrected_errors=3), gpu(1)]), {"gpu-memory-errors"}, "3 memory errors"),
    ("remapping", lambda: second(gpus=[gpu(0, pending_repair=True), gpu(1)]), {"gpu-memory-errors"}, "remapped"),
    (
        "heat",
        lambda: second(gpus=[gpu(0), gpu(1, slowdowns=["hw_thermal_slowdown"], temperature_c=93)]),
        {"gpu-throttled"},
        "is slowed down at 93 °C: hw_thermal_slowdown",
    ),
    ("PCIe", lambda: second(gpus=[gpu(0, link_width=4), gpu(1)]), {"gpu-link-degraded"}, "uses 4 of 16 PCIe lanes"),
    ("ACS", lambda: second(acs_bridges=["0000:00:01.0"]), {"acs-enabled"}, "It worked just now."),
    (
        "IOMMU",
        lambda: second(gpus=[gpu(0, iommu="DMA-FQ"), gpu(1, iommu="DMA-FQ")]),
        {"iommu-not-passthrough"},
        "translates",
    ),
    (
        "GPUDirect",
        lambda: second(rdma=[IB], has_open_driver=False, limits={"memlock_bytes": None}),
        {"no-gpudirect-rdma"},
        "nvidia_peermem",
    ),
    (
        "a hang of two GPUs",
        hang_within,
        {"collective-timeout", "acs-enabled", "p2p-hang-risk"},
        "did not work just now",
    ),
    ("an error of NCCL", failed_between, {"collective-failed", "ib-retry-exceeded"}, "Most likely because of ib-retry"),
]


@pytest.mark.parametrize(("make", "codes", "words"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_each_fault_is_found_and_named(make: Callable[[], Examination], codes: set[str], words: str):
    found = make()
    findings = judge(found)
    assert {each["code"] for each in findings} == codes
    assert any(words in f"{each['message']} {each['evidence']}" for each in findings)
    for each in findings:
        assert each["severity"] == SEVERITY[each["code"]]
        assert each["nodes"]
        assert set(each["nodes"]) <= {node["address"] for node in found["nodes"]} | {TWO, THREE}
        assert all("." in step or "=" in step for step in each["advice"])
    told = verdict(found, findings)
    error = any(each["severity"] == "error" for each in findings)
    assert told.startswith("Not ready" if error else "Usable")


def test_the_same_on_several_nodes_is_said_once():
    tiny = {"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}
    (only,) = judge(examination(node(ONE, **tiny), node(TWO, **tiny)))
    assert only["nodes"] == [ONE, TWO]


def test_what_mends_it_goes_into_the_environment():
    (wrong,) = judge(no_such_interface())
    assert wrong["environment"] == {"NCCL_SOCKET_IFNAME": "=eth0"}
    differs = examination(node(ONE), node(TWO, ray_interface="ens3", environment={"NCCL_SOCKET_IFNAME": "ib"}))
    (wrong,) = judge(differs)
    assert wrong["environment"] == {}
    assert "unset NCCL_SOCKET_IFNAME" in wrong["advice"][0]
    mends = {name: value for each in judge(hang_within()) for name, value in each["environment"].items()}
    assert mends == {"NCCL_P2P_DISABLE": "1"}
    mixed = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\tSYS\nGPU1\tNV4\tX\tSYS\nGPU2\tSYS\tSYS\tX\n"
    (half,) = judge(second(topology=mixed))
    assert (half["code"], half["environment"]) == ("mixed-nvlink-pcie", {"NCCL_P2P_LEVEL": "NVL"})


def test_of_three_clocks_the_odd_one_is_named():
    """Also where it is the first, against which all are measured."""
    nodes = [node(each) for each in (ONE, TWO, THREE)]
    reaches = [reach(ONE, TWO, offset_ns=-5_000_000_000), reach(ONE, THREE, offset_ns=-5_000_200_000)]
    found = examination(*nodes, reaches=reaches)
    assert clock_offsets(found)[TWO] == (0, 60_000)
    (only,) = judge(found)
    assert only["nodes"] == [ONE]
    assert "5.000 s ahead of the others" in only["message"]


def test_a_clock_is_judged_by_no_more_than_is_known():
    slow = reach(ONE, TWO, offset_ns=150_000_000, round_trip_ns=200_000_000)
    assert judge(examination(reaches=[slow, reach(TWO, ONE)])) == []


def test_causes_come_before_what_follows():
    found = blocked()
    hung = collective("between", ONE, TWO, backend="gloo", status="timeout", duration_ns=None, reason="rank 0 …")
    findings = judge({**found, "collectives": [*found["collectives"][:2], hung]})
    assert [each["code"] for each in findings] == ["connection-timeout", "collective-timeout"]
    assert "Most likely because of connection-timeout" in findings[1]["message"]
    assert verdict(found, findings).startswith("Not ready (2 nodes): connection-timeout. From 10.0.0.2 to 10.0.0.1")
    assert verdict(found, findings).endswith(" (1 more error).")
