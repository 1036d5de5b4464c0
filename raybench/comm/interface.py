"""A node's network interface: its speed, and how many bytes have gone through it."""

from __future__ import annotations

import os
from pathlib import Path

from raybench.worker.messages import Row
from raybench.worker.network import interface_of

_CLASS = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")
LOOPBACK = "lo"


def used_interface(backend: str, node: str) -> str | None:
    """The interface that gloo's, or NCCL's, sockets use on the node with that address, where it is one."""
    named = os.environ.get("GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME", "")
    name = named.removeprefix("=")
    return name if (_CLASS / name).exists() and name else interface_of(node)


def link_bytes_per_s(backend: str, interface: str | None) -> float | None:
    """The speed that the interface says it has; None where it says none, or NCCL may use an RDMA device instead."""
    if interface is None:
        return None
    if backend == "nccl" and os.environ.get("NCCL_IB_DISABLE") != "1" and _RDMA.is_dir() and any(_RDMA.iterdir()):
        return None
    try:
        megabits = int((_CLASS / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


class Counters:
    """Bytes sent through a node's interface, and through its loopback, which carries what stays on the node."""

    def __init__(self, interface: str | None) -> None:
        self._interface = interface if interface != LOOPBACK else None

    def read(self) -> tuple[int | None, int | None]:
        """Bytes since the interfaces came up: to the network, and on the loopback; None where it cannot be told."""
        return _sent(self._interface), _sent(LOOPBACK)

    def sent_since(self, before: tuple[int | None, int | None]) -> Row:
        names = ("network_bytes", "loopback_bytes")
        return {
            name: None if then is None or now is None else now - then
            for name, then, now in zip(names, before, self.read(), strict=True)
        }


def _sent(interface: str | None) -> int | None:
    if interface is None:
        return None
    try:
        return int((_CLASS / interface / "statistics" / "tx_bytes").read_text())
    except (OSError, ValueError):
        return None
