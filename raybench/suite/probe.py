"""What one node has: run on that node, as a Ray task or in this process. Nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from raybench import __version__
from raybench.worker.network import interface_of


def probe_node(address: str) -> dict[str, Any]:
    """The node's hardware, versions and the network interface that carries `address`, as plain data."""
    return {
        "address": address,
        "host": socket.gethostname(),
        "cpu_model": cpu_model(),
        "num_cpus": usable_cpus(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus(),
        "interface": interface_of(address),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions that must agree on every node."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ray": _version("ray"),
        "raybench": __version__,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def usable_cpus() -> int:
    """Cores that this process may use: its affinity, within the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Memory of the host, or the control group's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def gpus() -> list[dict[str, Any]]:
    """Name and memory of every GPU, by nvidia-smi, or by torch where that is not there but a device is."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode == 0:
            lines = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
            return [{"name": name.strip(), "memory_bytes": _mebibytes(text)} for name, _, text in lines]
    if not Path("/dev/nvidia0").exists():
        return []
    import torch

    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": device.name, "memory_bytes": device.total_memory} for device in properties]


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.strip().isdigit() else None
