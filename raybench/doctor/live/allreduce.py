"""Short all-reduces on processes of their own: NCCL on the GPUs that are free, else gloo. They end, or are ended."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from raybench.doctor.live.facts import Collective, Node
from raybench.doctor.live.rounds import Trial, trials
from raybench.suite.cluster import collect

START_S: Final = 120.0
"""How long a process may take to start and to import torch."""
LIMIT_S: Final = {"gloo": 30.0, "nccl": 120.0}
"""How long an all-reduce may take, the making of its group included: NCCL looks for its devices first."""
MARGIN_S: Final = 10.0
NUM_ELEMENTS: Final = {"gloo": 1 << 20, "nccl": 1 << 24}
NUM_REPEATS: Final = 5
_LOG_BYTES: Final = 4 << 20


class Rank:
    """One rank, in a process of Ray's. Two calls may be under way, so that a hanging rank can be asked."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self._address = address
        self._log = Path(tempfile.gettempdir()) / f"raybench-doctor-nccl.{os.getpid()}.log"
        os.environ.update(environment)

    def gpu_ids(self) -> list[str]:
        """The GPU that Ray reserved, as CUDA_VISIBLE_DEVICES names it; none without GPUs."""
        import ray

        return [str(each) for each in ray.get_gpu_ids()]

    def prepare(self, visible: Sequence[str], own: int) -> int:
        """Import torch with those GPUs of the node in view, as training has it; a free port of the node."""
        from raybench.worker.network import choose_interface

        if visible:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "INFO", str(self._log)
            os.environ.pop("NCCL_DEBUG_SUBSYS", None)
        self._device = own
        choose_interface(self._address)
        import torch

        torch.set_num_threads(1)
        with socket.create_server(("", 0)) as free:
            return int(free.getsockname()[1])

    def all_reduce(self, backend: str, leader: str, rank: int, size: int, limit_s: float) -> int:
        """Do it; nanoseconds of the middle one of several, counted from a barrier.

        Raises:
            Exception: whatever torch says; a wrong sum too.
        """
        import torch
        from torch import distributed

        device = torch.device("cuda", self._device) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group(
            backend, init_method=f"tcp://{leader}", rank=rank, world_size=size, timeout=timedelta(seconds=limit_s)
        )
        try:
            durations = []
            for _ in range(1 + NUM_REPEATS):  # the first opens connections
                values = torch.full((NUM_ELEMENTS[backend],), float(rank + 1), device=device)
                distributed.barrier()
                begin = time.perf_counter_ns()
                distributed.all_reduce(values)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                durations.append(time.perf_counter_ns() - begin)
                if not bool((values == size * (size + 1) / 2).all()):
                    raise RuntimeError("the sum is wrong")
            return int(statistics.median(durations[1:]))
        finally:
            if backend != "nccl" or durations[NUM_REPEATS:]:  # NCCL's closing can wait for a lost peer for ever
                distributed.destroy_process_group()

    def take_log(self, is_wanted: bool) -> str | None:
        """What NCCL wrote, if that is wanted; removed in any case."""
        with suppress(OSError), self._log.open("rb") as handle:
            text = handle.read(_LOG_BYTES).decode("utf-8", "replace")
            self._log.unlink()
            return text if is_wanted else None
        return None


def ranks_of(nodes: Sequence[Node]) -> tuple[str, list[int]]:
    """(backend, the node of every rank): a rank for each GPU that is free, else up to two for each node."""
    gpus = [min(node.get("free_gpus", 0), len(node["gpus"])) for node in nodes]
    if sum(gpus) > 1:
        return "nccl", [at for at, number in enumerate(gpus) for _ in range(number)]
    alone = len(nodes) == 1
    return "gloo", [at for at, node in enumerate(nodes) for _ in range(2 if alone or node["num_cpus"] > 1 else 1)]


def run_trials(
    nodes: Sequence[Node], node_ids: Mapping[str, str], environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[list[Collective], list[str]]:
    """All-reduces of two and of all ranks on `nodes`, and what was left out, with the reason.

    Args:
        node_ids: Ray's name of a node by its address.
        environment: variables for every rank.
    """
    backend, node_of_rank = ranks_of(nodes)
    found: list[Collective] = []
    skipped: list[str] = []
    for trial in trials(node_of_rank):
        failed = [each for each in found if each["status"] != "ok"]
        if failed and trial.stage == "all":
            skipped.append("the all-reduce over all ranks: one over two ranks did not work")
            continue
        say(f"all-reduce, {_TOLD[trial.stage]}: {backend}")
        found += _try(trial, backend, [nodes[at] for at in node_of_rank], node_ids, environment)
    return found, skipped


_TOLD: Final = {"within": "two ranks of a node", "between": "two nodes", "all": "all ranks"}


def _try(
    trial: Trial, backend: str, hosts: Sequence[Node], node_ids: Mapping[str, str], environment: Mapping[str, str]
) -> list[Collective]:
    """One trial on fresh processes, which are gone at its end."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(Rank)
    # Ray would show each process its own GPU alone; training sees all of the node's.
    own_view = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}} if backend == "nccl" else {}
    actors = {
        rank: remote.options(
            num_cpus=0,
            num_gpus=1 if backend == "nccl" else 0,
            max_restarts=0,
            max_concurrency=2,
            runtime_env=own_view,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_ids[hosts[rank]["address"]], soft=False),
        ).remote(hosts[rank]["address"], dict(environment))
        for group in trial.groups
        for rank in group
    }
    try:
        ports, faults = _prepare(actors, hosts)
        outcomes = _start(trial, backend, hosts, actors, ports, faults)
        return [_collective(trial, backend, hosts, actors, group, *outcomes) for group in trial.groups]
    finally:
        for actor in actors.values():
            ray.kill(actor)


def _prepare(actors: Mapping[int, Any], hosts: Sequence[Node]) -> tuple[dict[int, int], dict[int, str]]:
    """A port of every rank that is ready, and why others are not."""
    asked = {actor.gpu_ids.remote(): rank for rank, actor in actors.items()}
    gpus, late = collect(asked, START_S, on_late=_leave)
    seen: dict[str, list[str]] = {}
    for rank, own in gpus.items():
        seen.setdefault(hosts[rank]["address"], []).extend(own)
    asked = {}
    for rank, own in gpus.items():
        visible = seen[hosts[rank]["address"]]
        asked[actors[rank].prepare.remote(visible, visible.index(own[0]) if own else 0)] = rank
    ports, slow = collect(asked, START_S, on_late=_leave)
    return ports, {**late, **slow}


def _start(
    trial: Trial,
    backend: str,
    hosts: Sequence[Node],
    actors: Mapping[int, Any],
    ports: Mapping[int, int],
    faults: Mapping[int, str],
) -> tuple[dict[int, int], dict[int, str]]:
    """Run every group whose ranks are all there; nanoseconds, or what went wrong, by rank."""
    limit_s = LIMIT_S[backend]
    asked = {}
    for group in trial.groups:
        if any(rank in faults for rank in group):
            continue
        leader = f"{hosts[group[0]]['address']}:{ports[group[0]]}"
        for index, rank in enumerate(group):
            asked[actors[rank].all_reduce.remote(backend, leader, index, len(group), limit_s)] = rank
    durations, failed = collect(asked, limit_s + MARGIN_S, on_late=_leave)
    return durations, {**faults, **failed}


def _collective(
    trial: Trial,
    backend: str,
    hosts: Sequence[Node],
    actors: Mapping[int, Any],
    group: Sequence[int],
    durations: Mapping[int, int],
    faults: Mapping[int, str],
) -> Collective:
    wrong = {rank: faults[rank] for rank in group if rank in faults}
    late = [text for text in wrong.values() if _is_late(text)]
    first = min(wrong, key=lambda rank: (_is_late(wrong[rank]), rank)) if wrong else group[0]
    log = None
    if backend == "nccl":
        asked = {actors[rank].take_log.remote(rank == first): rank for rank in group}
        log = collect(asked, MARGIN_S, on_late=_leave)[0].get(first)
    return {
        "stage": trial.stage,
        "nodes": [hosts[rank]["address"] for rank in group],
        "backend": backend,
        "status": "ok" if not wrong else "timeout" if len(late) == len(wrong) else "failed",
        "reason": f"rank {group.index(first)} on {hosts[first]['address']} {wrong[first]}" if wrong else None,
        "payload_bytes": NUM_ELEMENTS[backend] * 4,
        "duration_ns": None if wrong else max(durations[rank] for rank in group),
        "log": log,
    }


def _is_late(fault: str) -> bool:
    """Whether a fault is that nothing came in time, here or in torch's own words."""
    return any(word in fault.lower() for word in ("gave no answer", "timed out", "timeout"))


def _leave(reference: Any) -> None:
    """Nothing is cancelled: the process ends with its trial."""
