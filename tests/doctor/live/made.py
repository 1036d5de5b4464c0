"""Nodes of two A10s each, as they should be, and an examination of them; tests change what they are about."""

from __future__ import annotations

from typing import Any

from raybench.doctor.live.facts import Collective, Examination, Gpu, Interface, Node, Reach, Stream

GIB = 2**30
TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPXB\t0-29\t0\nGPU1\tPXB\t X \t0-29\t0\n"


def gpu(index: int = 0, **changes: Any) -> Gpu:
    made: dict[str, Any] = {
        "index": index,
        "name": "NVIDIA A10",
        "bus_id": f"00000000:0{index + 1}:00.0",
        "memory_bytes": 23028 * 2**20,
        "used_bytes": 4 * 2**20,
        "processes": [],
        "uncorrected_errors": 0,
        "pending_repair": False,
        "slowdowns": [],
        "temperature_c": 32,
        "link_width": 16,
        "max_link_width": 16,
        "iommu": None,
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def interface(name: str = "eth0", address: str | None = "10.0.0.1", **changes: Any) -> Interface:
    made = {"name": name, "address": address, "is_up": True, "mtu": 9000, "claimed_mbps": 50_000}
    return {**made, **changes}  # type: ignore[typeddict-item]


def node(address: str = "10.0.0.1", **changes: Any) -> Node:
    """A node of two free A10s; `versions` and `limits` that are given change single values."""
    made: dict[str, Any] = {
        "address": address,
        "host": f"host-{address.rpartition('.')[2]}",
        "ray_cpus": 60.0,
        "ray_gpus": 2,
        "free_gpus": 2,
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0+cu126",
            "ray": "2.58.0",
            "raybench": "0.1.0",
            "cuda": "12.6",
            "nccl": "2.27.3",
            "driver": "570.124.06",
            "driver_cuda": "12.8",
        },
        "num_cpus": 60,
        "memory_bytes": 480 * GIB,
        "gpus": [gpu(0), gpu(1)],
        "num_pci_gpus": 2,
        "topology": TOPOLOGY,
        "interfaces": [interface("lo", "127.0.0.1", mtu=65536, claimed_mbps=None), interface(address=address)],
        "ray_interface": "eth0",
        "rdma": [],
        "environment": {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"},
        "shm_bytes": 240 * GIB,
        "shm_free_bytes": 240 * GIB,
        "limits": {
            "memory_bytes": None,
            "memory_used_bytes": None,
            "cpus": None,
            "pids": None,
            "pids_used": None,
            "memlock_bytes": 8 << 20,
            "open_files": 65536,
        },
        "acs_bridges": [],
        "modules": [],
        "has_open_driver": True,
        "kernel": "5.15.0-1061-oracle",
        "is_clock_synchronised": True,
    }
    for name in ("versions", "limits"):
        changes[name] = {**made[name], **changes.get(name, {})}
    return {**made, **changes}  # type: ignore[typeddict-item]


def reach(source: str, target: str, **changes: Any) -> Reach:
    made = {
        "source": source,
        "target": target,
        "at": target,
        "ports": {6379: "ok", 40001: "ok", 50001: "ok"},
        "answered_by": target,
        "round_trip_ns": 120_000,
        "offset_ns": 40_000,
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def stream(source: str, target: str, gbps: float = 23.0) -> Stream:
    return {"source": source, "target": target, "num_bytes": int(gbps / 8 * 1e9), "duration_ns": 10**9}


def collective(stage: str, *nodes: str, **changes: Any) -> Collective:
    made = {
        "stage": stage,
        "nodes": list(nodes),
        "backend": "nccl",
        "status": "ok",
        "reason": None,
        "payload_bytes": 2**26,
        "duration_ns": 40_000_000,
        "log": None,
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def examination(*nodes: Node, **changes: Any) -> Examination:
    """All is well between these nodes, unless told otherwise."""
    nodes = nodes or (node("10.0.0.1"), node("10.0.0.2"))
    addresses = [each["address"] for each in nodes]
    pairs = [(one, other) for one in addresses for other in addresses if one != other]
    neighbours = [pair for pair in pairs if abs(addresses.index(pair[0]) - addresses.index(pair[1])) == 1]
    within = [collective("within", each, each) for each in addresses]
    made: dict[str, Any] = {
        "nodes": list(nodes),
        "silent": {},
        "lost": [],
        "reaches": [reach(*pair) for pair in pairs],
        "purposes": {each: {each: ["Ray"], "6379": ["Ray's control service"]} for each in addresses},
        "streams": [stream(*pair) for pair in neighbours],
        "collectives": [*within, collective("all", *(each for each in addresses for _ in range(2)))],
        "skipped": [],
    }
    return {**made, **changes}  # type: ignore[typeddict-item]
