"""PCI bridges that send traffic between two GPUs up to the CPU: Access Control Services (ACS), read from sysfs.

`lspci -vvv` shows the same as `ACSCtl: ... ReqRedir+`. Configuration space beyond 64 bytes is root's alone.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/sys/bus/pci/devices")
_EXTENDED: Final = 0x100  # where extended capabilities begin
_ACS: Final = 0x000D
_REDIRECTS: Final = 0x04 | 0x08 | 0x20  # request redirect, completion redirect, egress control
_NVIDIA: Final = "0x10de"


def acs_bridges(devices: Path = DEVICES) -> list[str] | None:
    """Bus ids of the bridges with ACS redirection on; None where their configuration may not be read."""
    found = []
    for device in _of_class(devices, "0x0604"):
        try:
            config = (device / "config").read_bytes()
        except OSError:
            return None
        if len(config) == 64:
            return None
        control = acs_control(config)
        if control is not None and control & _REDIRECTS:
            found.append(device.name)
    return found


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a device's configuration space, or None if it has no such capability."""
    offset, seen = _EXTENDED, set()
    while offset >= _EXTENDED and offset + 8 <= len(config) and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", config, offset + 6)[0])
        offset = header >> 20
    return None


def num_nvidia_gpus(devices: Path = DEVICES) -> int:
    """NVIDIA's display and 3D controllers."""
    gpus = [*_of_class(devices, "0x0300"), *_of_class(devices, "0x0302")]
    return sum(_read(device / "vendor") == _NVIDIA for device in gpus)


def iommu_type(bus_id: str, devices: Path = DEVICES) -> str | None:
    """How a device's IOMMU group translates addresses, or None without an IOMMU. `bus_id` as nvidia-smi prints it."""
    domain, _, rest = bus_id.lower().partition(":")
    return _read(devices / f"{domain[-4:]}:{rest}" / "iommu_group" / "type") or None


def _of_class(devices: Path, prefix: str) -> list[Path]:
    try:
        return sorted(device for device in devices.iterdir() if _read(device / "class").startswith(prefix))
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
