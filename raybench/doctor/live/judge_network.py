"""Judging what lies between nodes: ports, interfaces, clocks, bandwidth, packet sizes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Final

from raybench.doctor.live.facts import Examination, Node, Outcome, Reach, bits_per_s
from raybench.doctor.live.finding import LiveFinding, about, some
from raybench.doctor.live.interfaces import INTERNAL, choices, gloo_choice
from raybench.doctor.live.judge_hosts import by_value, odd_ones, told
from raybench.doctor.live.links import expected_gbps, slow_links

LARGEST_OFFSET_NS: Final = 100_000_000
"""Clocks that something keeps are within milliseconds."""
_CODES: Final[dict[Outcome, tuple[str, str]]] = {
    "timeout": ("connection-timeout", "gives no answer: something on the way drops it"),
    "refused": ("connection-refused", "is refused, although somebody listens there: a firewall answers for it"),
    "unreachable": ("peer-unreachable", "is rejected on the way: a firewall, or no route"),
}
_OPEN: Final = [
    "Let the nodes reach each other on all TCP ports: gloo and NCCL listen on any of the range in "
    "/proc/sys/net/ipv4/ip_local_port_range. Two firewalls count, the provider's (security list, security group) and "
    "the host's own: `sudo iptables -I INPUT 1 -s SUBNET -j ACCEPT`.",
    "Try again by hand: `nc -l 41000` on one node, `nc -vz ADDRESS 41000` on the other.",
]


def judge_network(found: Examination) -> list[LiveFinding]:
    """All findings between nodes, causes before what follows from them."""
    return [*_interfaces(found), *_ports(found), *_slow(found), *_packets(found), *_clocks(found)]


def common_interface(nodes: Sequence[Node]) -> str | None:
    """The name of the interface that carries Ray, if it is the same on every node."""
    names = {node["ray_interface"] for node in nodes}
    return names.pop() if len(names) == 1 else None


def interface_environment(nodes: Sequence[Node]) -> dict[str, str]:
    """The variables that make gloo and NCCL use the interface that carries Ray, where one value fits all nodes."""
    name = common_interface(nodes)
    return {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name} if name else {}


def clock_offsets(found: Examination) -> dict[str, tuple[int, int]]:
    """(offset, error) of every node's clock in ns, against the first node's; where there are three or more, against
    the middle one's, so that the odd one out stands out."""
    if not found["nodes"]:
        return {}
    first = found["nodes"][0]["address"]
    offsets = {first: (0, 0)}
    for each in found["reaches"]:
        trip, offset = each["round_trip_ns"], each["offset_ns"]
        direct = each["source"] == first and each["answered_by"] == each["target"]
        if direct and trip is not None and offset is not None and each["at"] == each["target"]:
            offsets[each["target"]] = (offset, trip // 2)
    middle = median_low(offset for offset, _ in offsets.values()) if len(offsets) > 2 else 0
    return {address: (offset - middle, error) for address, (offset, error) in offsets.items()}


def _interfaces(found: Examination) -> list[LiveFinding]:
    several = len(found["nodes"]) > 1
    judged: list[LiveFinding] = []
    for node in found["nodes"]:
        mended = interface_environment(found["nodes"])
        for variable, chosen in choices(node["environment"], node["interfaces"]).items():
            value = node["environment"][variable]
            line = f"{node['address']}: {variable}={value}"
            advice = _which_interface(node, variable, mended)
            mend = {variable: mended[variable]} if variable in mended else {}
            names = some(each["name"] for each in node["interfaces"])
            if not chosen:
                missing = gloo_choice(value, node["interfaces"])[1] if variable.startswith("GLOO") else [value]
                judged.append(
                    about(
                        [node["address"]],
                        "interface-not-found",
                        f"{variable} is {value!r} on {node['address']}, and no interface that is up and has an "
                        f"address answers to {some(missing)!r}; there are {names}.",
                        line,
                        advice,
                        mend,
                    )
                )
            elif several and (why := _wrong(node, [each["address"] for each in chosen], found["reaches"])):
                wrong = some(f"{each['name']} ({each['address']})" for each in chosen)
                judged.append(
                    about(
                        [node["address"]],
                        "wrong-interface",
                        f"{variable} makes {node['address']} use {wrong}: {why}.",
                        line,
                        advice,
                        mend,
                    )
                )
    carrier = [node for node in found["nodes"] if several and INTERNAL.match(node["ray_interface"] or "")]
    for node in carrier:
        judged.append(
            about(
                [node["address"]],
                "wrong-interface",
                f"Ray itself has taken {node['ray_interface']} on {node['address']}, which leads to the host's own "
                "containers.",
                f"{node['address']}: Ray's address is on {node['ray_interface']}",
                ["ray start --node-ip-address=ADDRESS, with the address by which the other nodes reach this one."],
            )
        )
    return judged


def _which_interface(node: Node, variable: str, mended: dict[str, str]) -> list[str]:
    if variable in mended:
        return [f"{variable}={mended[variable]}, the interface that carries Ray, on every node."]
    return [
        f"The interface that carries Ray is {node['ray_interface']} on this node and another one elsewhere: unset "
        f"{variable} before `ray start`; raybench then sets it on each node."
    ]


def _wrong(node: Node, addresses: Sequence[str | None], reaches: Sequence[Reach]) -> str | None:
    """Why others cannot use these addresses of a node; None if they can, or if Ray's own address is among them."""
    if node["address"] in addresses:
        return None
    for each in reaches:
        if each["target"] == node["address"] and each["at"] in addresses and each["answered_by"] != each["target"]:
            if each["answered_by"] is None:
                return f"{each['source']} gets no answer there, while {node['address']} is Ray's own address"
            other = "itself" if each["answered_by"] == each["source"] else each["answered_by"]
            return f"{each['source']} reaches {other} there"
    return None


def _ports(found: Examination) -> list[LiveFinding]:
    judged = []
    for each in found["reaches"]:
        if each["at"] != each["target"]:
            continue  # an interface's address: judged with the interface
        names = found["purposes"].get(each["target"], {})
        for outcome, (code, meaning) in _CODES.items():
            ports = [port for port, how in each["ports"].items() if how == outcome]
            if not ports:
                continue
            shown = some(f"{port} ({names[str(port)][0]})" if str(port) in names else str(port) for port in ports)
            judged.append(
                about(
                    [each["source"], each["target"]],
                    code,
                    f"From {each['source']} to {each['target']} a TCP connection to port {shown} {meaning}. "
                    + _how_many(len(ports), len(each["ports"])),
                    f"{each['source']} -> {each['target']}: {len(ports)} of {len(each['ports'])} ports {outcome}: "
                    f"{shown}",
                    _OPEN,
                )
            )
    return judged


def _how_many(closed: int, tried: int) -> str:
    if closed == tried:
        return f"None of the {tried} ports tried answers."
    return f"The other {tried - closed} of {tried} ports tried answer, so the host is there and a rule picks ports."


def _slow(found: Examination) -> list[LiveFinding]:
    known = {node["address"]: node for node in found["nodes"]}
    judged = []
    for each in slow_links(found["streams"], found["nodes"]):
        rate = bits_per_s(each) / 1e9
        _, reason = expected_gbps(each, found["streams"], known)
        shown = f"{rate:.3g} Gbit/s" if rate >= 1 else f"{rate * 1000:.3g} Mbit/s"
        stuck = [
            "Almost nothing arrives although connections open: compare the MTU along the way, `ping -M do -s 8972`."
        ]
        judged.append(
            about(
                [each["source"], each["target"]],
                "slow-link",
                f"From {each['source']} to {each['target']} the network carries {shown}, and {reason}.",
                f"{each['source']} -> {each['target']}: {each['num_bytes']} bytes in {each['duration_ns'] / 1e9:.2f} s",
                [
                    *(stuck if rate < 1e-3 else []),
                    "Both directions tell which end it is: a host that is slow towards all its neighbours sends "
                    "slowly.",
                    "Look for a limit (`tc qdisc show`), a link that came up slower (`ethtool IFACE`), errors (`ip "
                    "-s link`), and the shape's own bandwidth; other work on the network counts too: ask again when "
                    "it is quiet.",
                ],
            )
        )
    return judged


def _packets(found: Examination) -> list[LiveFinding]:
    def mtu(node: Node) -> str | None:
        return next((str(each["mtu"]) for each in node["interfaces"] if each["name"] == node["ray_interface"]), None)

    values = by_value(found["nodes"], mtu)
    if len(values) < 2:
        return []
    return [
        about(
            odd_ones(values),
            "mtu-differs",
            f"The MTU of the interface that carries Ray differs: {told(values)}. Connections open, and large messages "
            "may be dropped on the way.",
            f"MTU: {told(values)}",
            ["Give every node the same: ip link set dev IFACE mtu 9000 (or 1500)."],
        )
    ]


def _clocks(found: Examination) -> list[LiveFinding]:
    kept = {node["address"]: node["is_clock_synchronised"] for node in found["nodes"]}
    judged = []
    for address, (offset, error) in clock_offsets(found).items():
        if abs(offset) - error > LARGEST_OFFSET_NS:
            other = "the others" if len(found["nodes"]) > 2 else found["nodes"][0]["address"]
            nobody = " Its kernel says that nothing sets it." if kept[address] is False else ""
            judged.append(
                about(
                    [address],
                    "clock-offset",
                    f"The clock of {address} is {abs(offset) / 1e9:.3f} s {'ahead of' if offset > 0 else 'behind'} "
                    f"{other}.{nobody} raybench measures and corrects it; timestamps of logs, tokens and requests "
                    "that are signed are off by as much.",
                    f"{address}: {offset / 1e9:+.3f} s ± {error / 1e9:.6f} s",
                    ["`chronyc makestep` (or `timedatectl set-ntp true`) on that node, and let the service run."],
                )
            )
    return judged
