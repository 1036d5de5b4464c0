"""An examination: the facts of every node through Ray, what lies between them, and a few all-reduces. Nothing hangs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from raybench.doctor.live.allreduce import run_trials
from raybench.doctor.live.facts import Examination, Node, Reach, Stream, bits_per_s
from raybench.doctor.live.interfaces import choices
from raybench.doctor.live.links import slow_links
from raybench.doctor.live.node import examine
from raybench.doctor.live.reach import CONNECT_S, STREAM_S, WARM_UP_S, Listener, reach, stream, try_port
from raybench.doctor.live.rounds import neighbours
from raybench.suite.cluster import collect

ANSWER_S: Final = 60.0
"""How long a node may take to start a process and to look at itself; a hanging nvidia-smi is given up sooner."""
_AT_A_TIME: Final = 8
_EXPECTED_ENDS: Final = (1, 4)
"""Of Ray's NodeDeathInfo.Reason: ended on purpose, and drained by the autoscaler because it was idle."""
_LIBRARIES: Final = {"GLOO_SOCKET_IFNAME": "gloo", "NCCL_SOCKET_IFNAME": "NCCL"}
_TOLD: Final = {"ok": "answers", "timeout": "does not answer", "refused": "is refused", "unreachable": "is rejected"}
Try = tuple[str, str, list[int], list[int]]
"""Node, address, ports, ports of its listener."""


class Hand:
    """The doctor's process on one node."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener: Listener | None = None

    def examine(self) -> Node:
        return examine(self._address)

    def listen(self) -> list[int]:
        """Answer others from now on, at these ports."""
        self._listener = Listener(self._address)
        return self._listener.ports

    def reach(self, tries: Sequence[Try]) -> list[Reach]:
        with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
            return list(pool.map(lambda each: reach(self._address, *each), tries))

    def stream(self, at: str, port: int) -> None:
        stream(self._address, at, port)

    def received(self, source: str) -> tuple[int, int]:
        assert self._listener is not None
        return self._listener.received(source)


def examine_cluster(say: Callable[[str], None], environment: Mapping[str, str]) -> Examination:
    """Examine the cluster that this process is connected to.

    Args:
        say: takes a line about what happens now.
        environment: NCCL settings for the all-reduces.
    """
    import ray

    listed = ray.nodes()
    started = [(each, _hand(each)) for each in listed if each["Alive"]]
    try:
        say(f"asking {len(started)} node{'s' if len(started) > 1 else ''}")
        nodes, silent, answering = _facts(started)
        alive = {address: each for address, (each, _) in answering.items()}
        hands = {address: hand for address, (_, hand) in answering.items()}
        found: Examination = {
            "nodes": nodes,
            "silent": silent,
            "lost": _lost(listed, [*alive, *silent]),
            "reaches": [],
            "purposes": {},
            "streams": [],
            "collectives": [],
            "skipped": _skipped(nodes),
        }
        if len(nodes) > 1:
            found["purposes"] = {node["address"]: _purposes(node, alive[node["address"]]) for node in nodes}
            say("connecting every node to every other")
            found["reaches"], open_ports = _reaches(nodes, hands, found["purposes"])
            say("sending between neighbours")
            found["streams"] = _streams(nodes, hands, found["reaches"], open_ports)
    finally:
        for _, hand in started:
            ray.kill(hand)
    if nodes:
        node_ids = {address: str(each["NodeID"]) for address, each in alive.items()}
        found["collectives"], left_out = run_trials(nodes, node_ids, environment, say)
        found["skipped"] += left_out
    return found


def _lost(listed: Sequence[Mapping[str, Any]], known: Sequence[str]) -> list[str]:
    """Addresses of nodes that went away without being told to, and have not come back."""
    dead = (each for each in listed if not each["Alive"] and each.get("DeathReason") not in _EXPECTED_ENDS)
    return sorted({str(each["NodeManagerAddress"]) for each in dead} - set(known))


def _hand(listed: Mapping[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(str(listed["NodeID"]), soft=False)
    actor = ray.remote(Hand).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
    return actor.remote(str(listed["NodeManagerAddress"]))


def _facts(
    started: Sequence[tuple[Mapping[str, Any], Any]],
) -> tuple[list[Node], dict[str, str], dict[str, tuple[Mapping[str, Any], Any]]]:
    """The nodes that answer, the driver's own first; why others do not; and Ray's entry and the hand of those that do.

    A host whose Ray was just started again may be listed twice; the entry that answers counts.
    """
    import ray

    from raybench.suite.cluster import free_resources

    free = free_resources()
    asked = {hand.examine.remote(): number for number, (_, hand) in enumerate(started)}
    answers, faults = collect(asked, ANSWER_S, on_late=_leave)
    own = str(ray.util.get_node_ip_address())
    nodes: list[Node] = []
    answering: dict[str, tuple[Mapping[str, Any], Any]] = {}
    for number, node in answers.items():
        listed, hand = started[number]
        node["ray_cpus"] = float(listed["Resources"].get("CPU", 0))
        node["ray_gpus"] = int(listed["Resources"].get("GPU", 0))
        node["free_gpus"] = int(free.get(str(listed["NodeID"]), {}).get("GPU", 0))
        nodes.append(node)
        answering[node["address"]] = listed, hand
    silent = {
        address: f"{fault}; {_from_here(address, started[number][0])}"
        for number, fault in faults.items()
        if (address := str(started[number][0]["NodeManagerAddress"])) not in answering
    }
    return sorted(nodes, key=lambda node: (node["address"] != own, node["address"])), silent, answering


def _from_here(address: str, listed: Mapping[str, Any]) -> str:
    """Which of a silent node's ports answer the driver."""
    told = [f"{name} (port {port}) {_TOLD[try_port(address, port)]}" for name, port in _ray_ports(listed).items()]
    return "from here its " + ", its ".join(told)


def _ray_ports(listed: Mapping[str, Any]) -> dict[str, int]:
    """Ports that other nodes must reach: without the second, tasks run and their data never arrives."""
    return {"node manager": int(listed["NodeManagerPort"]), "object manager": int(listed["ObjectManagerPort"])}


def _purposes(node: Node, listed: Mapping[str, Any]) -> dict[str, list[str]]:
    """What others want from this node's addresses and ports."""
    import ray

    found: dict[str, list[str]] = {node["address"]: ["Ray"]}
    for variable, chosen in choices(node["environment"], node["interfaces"]).items():
        for address in [each["address"] for each in chosen if each["address"]][:4]:
            found.setdefault(address, []).append(_LIBRARIES[variable])
    ports = _ray_ports(listed)
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    if host == node["address"]:
        ports["control service"] = int(port)
    for name, number in ports.items():
        found.setdefault(str(number), []).append(f"Ray's {name}")
    return found


def _reaches(
    nodes: Sequence[Node], hands: Mapping[str, Any], purposes: Mapping[str, Mapping[str, Sequence[str]]]
) -> tuple[list[Reach], dict[str, list[int]]]:
    """All pairs, both ways; and the ports at which each node listens."""
    addresses = [node["address"] for node in nodes]
    asked = {hands[address].listen.remote(): address for address in addresses}
    listening, _ = collect(asked, ANSWER_S, on_late=_leave)
    asked = {}
    for source in addresses:
        tries: list[Try] = []
        for target in addresses:
            if target != source and target in listening:
                fixed = [int(each) for each in purposes[target] if each.isdigit()]
                for at in (each for each in purposes[target] if not each.isdigit()):
                    tries.append((target, at, fixed if at == target else [], listening[target]))
        asked[hands[source].reach.remote(tries)] = source
    limit_s = ANSWER_S + 4 * CONNECT_S * math.ceil(2 * len(nodes) / _AT_A_TIME)
    answers, _ = collect(asked, limit_s, on_late=_leave)
    return [each for found in answers.values() for each in found], listening


def _streams(
    nodes: Sequence[Node], hands: Mapping[str, Any], reaches: Sequence[Reach], listening: Mapping[str, Sequence[int]]
) -> list[Stream]:
    """Neighbours that reach each other, one way and then the other; what looks slow is measured once more."""
    doors = {
        (each["source"], each["target"]): port
        for each in reaches
        if each["at"] == each["answered_by"] == each["target"]
        for port in listening[each["target"]][::-1]
        if each["ports"].get(port) == "ok"
    }
    found: list[Stream] = []
    for pairs in neighbours(len(nodes)):
        named = [(nodes[one]["address"], nodes[other]["address"]) for one, other in pairs]
        for links in (named, [(other, one) for one, other in named]):
            found += _send([(link, doors[link]) for link in links if link in doors], hands)
    for slow in slow_links(found, nodes):
        link = (slow["source"], slow["target"])
        again = _send([(link, doors[link])], hands)
        found = [max([each, *again], key=bits_per_s) if each is slow else each for each in found]
    return found


def _send(links: Sequence[tuple[tuple[str, str], int]], hands: Mapping[str, Any]) -> list[Stream]:
    limit_s = 10 * (WARM_UP_S + STREAM_S) + CONNECT_S
    asked = {hands[source].stream.remote(target, port): (source, target) for (source, target), port in links}
    collect(asked, limit_s, on_late=_leave)
    asked = {hands[target].received.remote(source): (source, target) for (source, target), _ in links}
    counted, _ = collect(asked, limit_s, on_late=_leave)
    return [
        {"source": source, "target": target, "num_bytes": size, "duration_ns": duration}
        for (source, target), (size, duration) in counted.items()
    ]


def _skipped(nodes: Sequence[Node]) -> list[str]:
    found = []
    without = [node["address"] for node in nodes if not node["gpus"]]
    if without:
        where = "no node has a GPU" if len(without) == len(nodes) else f"no GPU on {', '.join(without)}"
        found.append(f"driver, CUDA, NCCL, topology, ECC, throttling, ACS and IOMMU, GPUDirect: {where}")
    if len(nodes) == 1:
        found.append("ports, clocks and bandwidth between nodes: there is one node")
    for node in nodes:
        if node["gpus"] and node["acs_bridges"] is None:
            found.append(
                f"ACS on {node['address']}: only root may read PCI configuration (sudo lspci -vvv | grep ACSCtl)"
            )
        busy = min(len(node["gpus"]), node.get("ray_gpus", 0)) - node.get("free_gpus", 0)
        if busy > 0:
            found.append(
                f"{busy} of {len(node['gpus'])} GPUs of {node['address']} in the all-reduces: Ray gave them away"
            )
    return found


def _leave(reference: Any) -> None:
    """Nothing is cancelled: the process ends with the examination."""
