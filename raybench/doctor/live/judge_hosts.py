"""Judging hosts one by one and against each other: do they answer, versions, shared memory, limits, environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from raybench.doctor.live.facts import Examination, Node
from raybench.doctor.live.finding import LiveFinding, about, size, some
from raybench.doctor.nccl_advice import TEXTS

LEAST_SHM: Final = 512 << 20
"""A container that was told nothing has 64 MiB."""
LEAST_SHM_FREE: Final = 64 << 20
LEAST_MEMORY: Final = 2 << 30
LEAST_PIDS: Final = 512
LEAST_MEMLOCK: Final = 1 << 30
_SAME: Final = ("python", "torch", "cuda", "nccl", "ray", "raybench")
_OWN_VARIABLES: Final = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG_FILE",
    "NCCL_HOSTID",
    "CUDA_VISIBLE_DEVICES",
)
"""May differ between nodes."""


def judge_hosts(found: Examination) -> list[LiveFinding]:
    """All findings about what single hosts have, and how they differ."""
    nodes = found["nodes"]
    return [
        *_silent(found),
        *_versions(nodes),
        *_each(nodes, _shared_memory),
        *_each(nodes, _limits),
        *_each(nodes, _locked_memory),
        *_environment(nodes),
    ]


def by_value(nodes: Sequence[Node], value: Callable[[Node], str | None]) -> dict[str, list[str]]:
    """Addresses by value, the most common value first; unknown values are left out."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        each = value(node)
        if each is not None:
            found.setdefault(each, []).append(node["address"])
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def told(values: dict[str, list[str]]) -> str:
    """`2.13.0 on 10.0.0.1, 10.0.0.2; 2.9.0 on 10.0.0.3`."""
    return "; ".join(f"{value} on {some(addresses)}" for value, addresses in values.items())


def odd_ones(values: dict[str, list[str]]) -> list[str]:
    """The nodes that have another value than the most common; all of them where no value is more common."""
    groups = list(values.values())
    tied = len(groups) > 1 and len(groups[0]) == len(groups[1])
    return [address for group in groups[0 if tied else 1 :] for address in group]


def _each(nodes: Sequence[Node], judge: Callable[[Node], list[LiveFinding]]) -> list[LiveFinding]:
    """One node at a time; what several nodes have in common is said once."""
    merged: dict[tuple[str, str], LiveFinding] = {}
    for node in nodes:
        for each in judge(node):
            first = merged.setdefault((each["code"], each["message"]), each)
            if first is not each:
                first["nodes"] += each["nodes"]
                first["evidence"] = f"{first['evidence']}; {each['evidence']}"
    return list(merged.values())


def _silent(found: Examination) -> list[LiveFinding]:
    answers = [
        about(
            [address],
            "node-no-answer",
            f"{address} is in the cluster, and a task for it {why.partition(';')[0]}. Nothing else is known about it.",
            f"{address} {why}",
            [
                "A port that does not answer: let the nodes reach each other on all TCP ports (Ray takes 10002-19999 "
                "for its processes besides the ones it shows).",
                "All answer: look at the node itself, `ray logs raylet.err` and its free memory; raybench must be "
                "installed there.",
            ],
        )
        for address, why in found["silent"].items()
    ]
    lost = [
        about(
            [address],
            "node-lost",
            f"{address} was in the cluster and went away without being told to.",
            None,
            ["Was it preempted, out of memory, or cut off? `ray status` and the provider's console tell."],
        )
        for address in found["lost"]
    ]
    return answers + lost


def _versions(nodes: Sequence[Node]) -> list[LiveFinding]:
    found = []
    for package in _SAME:
        values = by_value(nodes, lambda node, name=package: node["versions"].get(name))  # type: ignore[misc]
        if len(values) > 1:
            found.append(
                about(
                    odd_ones(values),
                    "mixed-versions",
                    f"{package} differs between nodes: {told(values)}. Ranks of different versions fail in their "
                    "first collective, or compute different numbers; raybench refuses to run.",
                    f"{package}: {told(values)}",
                    [
                        f"Install the same {package} on every node, such as from constraints.txt: `ray up` does so "
                        "again."
                    ],
                )
            )
    return found


def _shared_memory(node: Node) -> list[LiveFinding]:
    total, free = node["shm_bytes"], node["shm_free_bytes"]
    if total is None or free is None or (total >= LEAST_SHM and free >= LEAST_SHM_FREE):
        return []
    what = f"has {size(total)}" if total < LEAST_SHM else f"is full: {size(free)} of {size(total)} free"
    return [
        about(
            [node["address"]],
            "shm-too-small",
            f"/dev/shm {what}. NCCL passes data between the GPUs of a node through it, and Ray and data loaders "
            f"between processes; {size(LEAST_SHM)} is little.",
            f"{node['address']}: /dev/shm {size(total)}, {size(free)} free",
            [*TEXTS["shm-too-small"][1], "On a host: mount -o remount,size=8g /dev/shm."],
        )
    ]


def _locked_memory(node: Node) -> list[LiveFinding]:
    limit = node["limits"]["memlock_bytes"]
    if limit is None or limit >= LEAST_MEMLOCK or not any(port["is_active"] for port in node["rdma"]):
        return []
    return [
        about(
            [node["address"]],
            "memlock-too-low",
            f"A process may lock {size(limit)}, and the RDMA adapters of this node need their buffers locked.",
            f"{node['address']}: memlock {size(limit)}, {some(port['name'] for port in node['rdma'])}",
            TEXTS["memlock-too-low"][1],
        )
    ]


def _limits(node: Node) -> list[LiveFinding]:
    limits, found = node["limits"], []
    memory, used = limits["memory_bytes"], limits["memory_used_bytes"]
    if memory is not None and memory - (used or 0) < LEAST_MEMORY:
        found.append(
            (
                "memory",
                f"{size(memory - (used or 0))} of {size(memory)} left",
                "docker run --memory, or the pod's limit",
            )
        )
    pids, num_pids = limits["pids"], limits["pids_used"]
    if pids is not None and pids - (num_pids or 0) < LEAST_PIDS:
        found.append(
            (
                "processes",
                f"{pids - (num_pids or 0)} of {pids} left",
                "docker run --pids-limit, or the kubelet's podPidsLimit",
            )
        )
    cpus, promised = limits["cpus"], node.get("ray_cpus", 0.0)
    if cpus is not None and cpus + 0.5 < promised:
        found.append(
            ("CPUs", f"{cpus:g}, and Ray gives away {promised:g}", "ray start --num-cpus, or the container's limit")
        )
    return [
        about(
            [node["address"]],
            "container-limit",
            f"The control group allows this node few {what}: {left}. What goes beyond is ended or held up without a "
            "word.",
            f"{node['address']}: {what} {left}",
            [f"Raise it: {where}."],
        )
        for what, left, where in found
    ]


def _environment(nodes: Sequence[Node]) -> list[LiveFinding]:
    names = sorted({name for node in nodes for name in node["environment"]} - set(_OWN_VARIABLES))
    found = []
    for name in names:
        values = by_value(nodes, lambda node, name=name: node["environment"].get(name, "unset"))  # type: ignore[misc]
        if name.startswith(("NCCL_", "TORCH_NCCL_", "RAYBENCH_NCCL")) and len(values) > 1:
            found.append(
                about(
                    odd_ones(values),
                    "environment-differs",
                    f"{name} differs between nodes: {told(values)}. Ranks that choose another algorithm or protocol "
                    "wait for each other for ever.",
                    f"{name}: {told(values)}",
                    [f"Set {name} alike on every node before `ray start`, or hand it to all ranks with --nccl-env."],
                )
            )
    return found
