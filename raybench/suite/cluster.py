"""What is there: every node as it says of itself, not as the cluster advertises it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from raybench.errors import RequestError
from raybench.suite.probe import probe_node
from raybench.suite.track import Scale
from raybench.wording import count

Backend = Literal["nccl", "gloo"]
Key = TypeVar("Key")
PROBE_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the cluster."""

    address: str
    node_id: str | None = None
    """Ray's own name of the node; None without Ray."""
    host: str
    cpu_model: str
    num_cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    interface: str | None = None
    """The network interface that carries `address`."""
    versions: Mapping[str, str]
    free_cpus: float
    """CPUs that the scheduler can still give; all of them without Ray."""
    total_cpus: float
    free_gpus: int
    total_gpus: int
    """GPUs that the scheduler knows and the node really has."""


@dataclass(frozen=True)
class Cluster:
    """All nodes, the one that most ranks fit on first."""

    nodes: tuple[Node, ...]

    @property
    def num_gpus(self) -> int:
        return sum(node.total_gpus for node in self.nodes)

    @property
    def default_scale(self) -> Scale:
        return "full" if self.num_gpus else "smoke"

    @property
    def versions(self) -> Mapping[str, str]:
        return self.nodes[0].versions

    def describe(self) -> str:
        """The cluster in one line."""
        cpus = sum(node.num_cpus for node in self.nodes)
        names = sorted({gpu.name for node in self.nodes for gpu in node.gpus})
        gpus = f"{self.num_gpus} × {', '.join(names)}" if self.num_gpus else "no GPU"
        memory = sum(node.memory_bytes for node in self.nodes) / 2**30
        return f"{count(len(self.nodes), 'node')}, {count(cpus, 'CPU')}, {memory:.0f} GiB, {gpus}"


def probe_local() -> Cluster:
    """This machine alone, as `--launcher torchrun` and `raybench list` see it."""
    found = probe_node("127.0.0.1")
    return Cluster((_node(found, None, free={}, total={}),))


def probe_ray(*, timeout_s: float = PROBE_TIMEOUT_S, strict: bool = True) -> Cluster:
    """Every node of the Ray cluster that this process is connected to.

    Args:
        strict: refuse a node that does not answer, instead of leaving it out.

    Raises:
        RequestError: a node that does not answer in time, or nodes of different versions.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = {str(n["NodeID"]): n for n in ray.nodes() if n["Alive"]}
    task = ray.remote(probe_node)
    asked = {}
    for node_id, node in alive.items():
        here = NodeAffinitySchedulingStrategy(node_id, soft=False)
        address = str(node["NodeManagerAddress"])
        asking = task.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        asked[asking.remote(address)] = (node_id, address)
    free = free_resources()
    answers, silent = collect(asked, timeout_s, on_late=lambda reference: ray.cancel(reference, force=True))
    nodes = [
        _node(found, node_id, free=free.get(node_id, {}), total=alive[node_id]["Resources"])
        for (node_id, _), found in answers.items()
    ]
    faults = [f"{address} {fault}" for (_, address), fault in silent.items()]
    if faults and (strict or not nodes):
        raise RequestError(f"cluster: {'; '.join(faults)}")
    _check_versions(nodes)
    return Cluster(tuple(sorted(nodes, key=_order)))


def collect(
    asked: Mapping[Any, Key], timeout_s: float, *, on_late: Callable[[Any], None]
) -> tuple[dict[Key, Any], dict[Key, str]]:
    """What remote calls answer, by the key of each; and of those that do not, why, in words that follow the key.

    Args:
        timeout_s: for all together.
        on_late: called with the reference of each that gave no answer in time.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    answers, faults = {}, {}
    for reference, key in asked.items():
        try:
            answers[key] = ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            on_late(reference)
            faults[key] = f"gave no answer in {timeout_s:.0f} s"
        except Exception as error:
            faults[key] = f"failed ({_last_line(error)})"
    return answers, faults


def _order(node: Node) -> tuple[int, float, str]:
    return (-node.free_gpus, -node.free_cpus, node.address)


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """What the scheduler can still give, by Ray's name of the node."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()  # type: ignore[no-any-return]


def _node(
    found: Mapping[str, Any],
    node_id: str | None,
    *,
    free: Mapping[str, float],
    total: Mapping[str, float],
) -> Node:
    gpus = tuple(Gpu(gpu["name"], gpu["memory_bytes"]) for gpu in found["gpus"])
    without_ray = not total
    total_cpus = float(found["num_cpus"]) if without_ray else total.get("CPU", 0.0)
    total_gpus = len(gpus) if without_ray else min(len(gpus), int(total.get("GPU", 0)))
    return Node(
        address=found["address"],
        node_id=node_id,
        host=found["host"],
        cpu_model=found["cpu_model"],
        num_cpus=found["num_cpus"],
        memory_bytes=found["memory_bytes"],
        gpus=gpus,
        interface=found["interface"],
        versions=found["versions"],
        free_cpus=total_cpus if without_ray else free.get("CPU", 0.0),
        total_cpus=total_cpus,
        free_gpus=total_gpus if without_ray else min(total_gpus, int(free.get("GPU", 0))),
        total_gpus=total_gpus,
    )


def _check_versions(nodes: Sequence[Node]) -> None:
    for package in ("python", "torch", "ray", "raybench"):
        by_version: dict[str, list[str]] = {}
        for node in nodes:
            by_version.setdefault(node.versions[package], []).append(node.address)
        if len(by_version) > 1:
            told = "; ".join(
                f"{version} on {', '.join(where)}" for version, where in sorted(by_version.items(), key=_rarest_last)
            )
            raise RequestError(f"cluster: {package} differs between nodes: {told} (install the same everywhere)")


def _rarest_last(found: tuple[str, list[str]]) -> tuple[int, str]:
    return -len(found[1]), found[0]


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
