"""A node's network interfaces, and which of them gloo and NCCL would take under the variables that are set."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from raybench.doctor.live.facts import Interface
from raybench.worker.network import ipv4_addresses

_CLASS: Final = Path("/sys/class/net")
INTERNAL: Final = re.compile(r"lo$|docker|br-[0-9a-f]{12}$|virbr|veth|cni|flannel|cali|tunl|ip6tnl")
"""Interfaces that lead to the host's own containers, or back to itself."""


def interfaces() -> list[Interface]:
    """All of this node, in the kernel's order."""
    addresses = ipv4_addresses()
    return [
        {
            "name": name,
            "address": addresses.get(name),
            "is_up": _text(name, "operstate") in ("up", "unknown"),
            "mtu": _number(name, "mtu"),
            "claimed_mbps": _number(name, "speed") if _has_hardware(name) else None,
        }
        for _, name in socket.if_nameindex()
    ]


def gloo_choice(wanted: str, known: Sequence[Interface]) -> tuple[list[Interface], list[str]]:
    """(interfaces that GLOO_SOCKET_IFNAME names, names that are no interface): exact names with commas."""
    by_name = {interface["name"]: interface for interface in known}
    names = [name for name in wanted.split(",") if name]
    return [by_name[name] for name in names if name in by_name], [name for name in names if name not in by_name]


def nccl_choice(wanted: str, known: Sequence[Interface]) -> list[Interface]:
    """The interfaces that NCCL_SOCKET_IFNAME lets NCCL use: prefixes with commas, `=` exact names, `^` all others.

    Without a name NCCL passes over docker* and lo. Only interfaces with an address count.
    """
    excludes = wanted.startswith("^")
    exact = wanted.removeprefix("^").startswith("=")
    names = [name for name in wanted.lstrip("^=").split(",") if name]

    def matches(name: str) -> bool:
        return any(name == each if exact else name.startswith(each) for each in names)

    usable = [interface for interface in known if interface["address"] and interface["is_up"]]
    return [interface for interface in usable if matches(interface["name"]) != excludes]


def choices(environment: Mapping[str, str], known: Sequence[Interface]) -> dict[str, list[Interface]]:
    """What each variable that is set makes its library use; gloo takes part only where all its names exist."""
    found: dict[str, list[Interface]] = {}
    if wanted := environment.get("GLOO_SOCKET_IFNAME"):
        chosen, missing = gloo_choice(wanted, known)
        found["GLOO_SOCKET_IFNAME"] = [] if missing else chosen
    if wanted := environment.get("NCCL_SOCKET_IFNAME"):
        found["NCCL_SOCKET_IFNAME"] = nccl_choice(wanted, known)
    return found


def _has_hardware(name: str) -> bool:
    return any((_CLASS / name / mark).exists() for mark in ("device", "bonding"))


def _text(name: str, attribute: str) -> str:
    with suppress(OSError):
        return (_CLASS / name / attribute).read_text().strip()
    return ""


def _number(name: str, attribute: str) -> int | None:
    text = _text(name, attribute)
    return int(text) if text.isdigit() and int(text) > 0 else None
