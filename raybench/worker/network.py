"""The network interface by which a node's ranks reach the others."""

from __future__ import annotations

import os
import socket
import struct
import sys

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915


def choose_interface(address: str) -> str | None:
    """Have gloo and NCCL use the interface that carries `address`, unless the user named one.

    Without this gloo binds to what the host's name resolves to, which is often its loopback. Must come before the
    process group is made. Returns the interface's name, or None if no interface carries the address.
    """
    name = interface_of(address)
    if name is not None:
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)
    return name


def interface_of(address: str) -> str | None:
    """Name of the interface that carries the IPv4 `address`, or None."""
    return next((name for name, own in ipv4_addresses().items() if own == address), None)


def ipv4_addresses() -> dict[str, str]:
    """The first IPv4 address of every network interface that has one, by the interface's name."""
    import fcntl

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
