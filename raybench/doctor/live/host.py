"""What a host allows its processes: shared memory, limits, modules, RDMA ports, clock; all from /proc and /sys."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Final

from raybench.doctor.live.facts import Limits, RdmaPort

PREFIXES: Final = ("NCCL_", "GLOO_", "TORCH_", "TP_", "UCX_", "FI_", "OMPI_", "CUDA_", "RAYBENCH_", "OMP_NUM_THREADS")
_MODULES: Final = ("nvidia_peermem", "gdrdrv", "nvidia_fs")
_UNLIMITED: Final = 1 << 60  # control groups of version 1 say "no limit" by a number near 2**63
_CGROUPS: Final = Path("/sys/fs/cgroup")
_TIME_ERROR: Final = 5


def environment() -> dict[str, str]:
    """The variables that steer communication, as processes that Ray starts here have them."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def shared_memory() -> tuple[int | None, int | None]:
    """(size, free) of /dev/shm in bytes."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def limits(cgroups: Path = _CGROUPS, own: str | None = None) -> Limits:
    """The tightest limit of each kind from this process's control group up; `own` stands for /proc/self/cgroup."""
    paths = _paths(_text(Path("/proc/self/cgroup")) if own is None else own)
    memory, used = _limit(cgroups, paths, "memory", ("memory.max", "memory.limit_in_bytes"),
                          ("memory.current", "memory.usage_in_bytes"))  # fmt: skip
    pids, num_pids = _limit(cgroups, paths, "pids", ("pids.max",), ("pids.current",))
    return {
        "memory_bytes": memory,
        "memory_used_bytes": used,
        "cpus": _cpus(cgroups, paths),
        "pids": pids,
        "pids_used": num_pids,
        "memlock_bytes": _soft(resource.RLIMIT_MEMLOCK),
        "open_files": _soft(resource.RLIMIT_NOFILE),
    }


def loaded_modules(proc: Path = Path("/proc/modules")) -> list[str]:
    """Which of the modules that let a NIC, a disk or the CPU reach GPU memory are loaded."""
    names = {line.split(" ", 1)[0] for line in _text(proc).splitlines()}
    return [name for name in _MODULES if name in names]


def has_open_driver(file: Path = Path("/proc/driver/nvidia/version")) -> bool:
    """Whether the NVIDIA driver is the one with open kernel modules."""
    return "Open Kernel Module" in _text(file)


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> list[RdmaPort]:
    """All ports of all RDMA devices, as `mlx5_0:1`."""
    return [
        {
            "name": f"{port.parent.parent.name}:{port.name}",
            "is_active": "ACTIVE" in _text(port / "state"),
            "link_layer": _text(port / "link_layer"),
            "rate": _text(port / "rate"),
        }
        for port in sorted(root.glob("*/ports/*"))
    ]


def is_clock_synchronised() -> bool | None:
    """Whether something (NTP, PTP) keeps the kernel's clock, as adjtimex tells; it changes nothing here."""
    nothing = ctypes.create_string_buffer(512)  # struct timex with room to spare: all zero changes nothing
    try:
        state = ctypes.CDLL(None).adjtimex(nothing)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _paths(own: str) -> dict[str, str]:
    """The control group of this process by controller; version 2 has one for all, under ''."""
    found: dict[str, str] = {}
    for line in own.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


def _folders(cgroups: Path, paths: dict[str, str], controller: str) -> list[Path]:
    """The group's folder and those above it; inside a container the path may not exist, and the root is the group."""
    roots = [(cgroups, paths.get("", "/")), (cgroups / controller, paths.get(controller, "/"))]
    found: list[Path] = []
    for root, path in roots:
        folder = root / path.lstrip("/")
        while folder != root:
            found.append(folder)
            folder = folder.parent
        found.append(root)
    return found


def _limit(
    cgroups: Path, paths: dict[str, str], controller: str, limit: tuple[str, ...], usage: tuple[str, ...]
) -> tuple[int | None, int | None]:
    """(limit, use) of the group with the smallest limit."""
    best: tuple[int, int | None] | None = None
    for folder in _folders(cgroups, paths, controller):
        value = next((v for name in limit if (v := _whole(folder / name)) is not None), None)
        if value is not None and value < _UNLIMITED and (best is None or value < best[0]):
            best = value, next((v for name in usage if (v := _whole(folder / name)) is not None), None)
    return best or (None, None)


def _cpus(cgroups: Path, paths: dict[str, str]) -> float | None:
    found = []
    for folder in _folders(cgroups, paths, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _whole(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
