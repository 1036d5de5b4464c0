"""Everything about one node that it can tell by itself: runs there, and needs neither Ray nor a GPU."""

from __future__ import annotations

import os
from typing import Any

from raybench.doctor.live import gpu, host, pci
from raybench.doctor.live.facts import Node
from raybench.doctor.live.interfaces import interfaces
from raybench.suite.probe import memory_bytes, usable_cpus, versions
from raybench.worker.network import interface_of


def examine(address: str) -> Node:
    """The facts of this node, which Ray knows by `address`. Torch is imported only where there are GPUs."""
    import socket

    gpus, drivers = gpu.read_smi(gpu.run_smi("-q", "-x"))
    built: dict[str, Any] = {"cuda": None, "nccl": None}
    if gpus:
        built = gpu.torch_versions()
    shm_bytes, shm_free_bytes = host.shared_memory()
    return {
        "address": address,
        "host": socket.gethostname(),
        "versions": {**versions(), **built, **drivers},
        "num_cpus": usable_cpus(),
        "memory_bytes": memory_bytes(),
        "gpus": gpus,
        "num_pci_gpus": pci.num_nvidia_gpus(),
        "topology": gpu.run_smi("topo", "-m") if gpus else None,
        "interfaces": interfaces(),
        "ray_interface": interface_of(address),
        "rdma": host.rdma_ports(),
        "environment": host.environment(),
        "shm_bytes": shm_bytes,
        "shm_free_bytes": shm_free_bytes,
        "limits": host.limits(),
        "acs_bridges": pci.acs_bridges(),
        "modules": host.loaded_modules(),
        "has_open_driver": host.has_open_driver(),
        "kernel": os.uname().release,
        "is_clock_synchronised": host.is_clock_synchronised(),
    }
