"""What is known of a cluster after an examination: plain data, so that it travels from nodes of any version as it is.

Every value that could not be told is None; sizes are bytes.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Outcome = Literal["ok", "refused", "timeout", "unreachable"]
"""How a TCP connection went: refused by the host, no answer at all, or rejected on the way."""
Stage = Literal["within", "between", "all"]
"""Two ranks of a node, two ranks of two nodes, or all ranks."""


class Gpu(TypedDict):
    """One GPU as the driver tells of it."""

    index: int
    name: str
    bus_id: str
    memory_bytes: int | None
    used_bytes: int | None
    processes: list[str]
    """What runs on it: `pid 4711 python 812 MiB`."""
    uncorrected_errors: int | None
    """ECC errors since the driver was loaded that could not be corrected; None without ECC."""
    pending_repair: bool
    """Whether memory waits to be remapped or retired at the next reset."""
    slowdowns: list[str]
    """Reasons other than load for which clocks are held down now."""
    temperature_c: int | None
    link_width: int | None
    max_link_width: int | None
    """PCIe lanes in use, and those that GPU and slot could use."""
    iommu: str | None
    """Type of its IOMMU group: `identity` passes addresses through, `DMA` and `DMA-FQ` translate. None without."""


class Interface(TypedDict):
    """One network interface."""

    name: str
    address: str | None
    """Its first IPv4 address."""
    is_up: bool
    mtu: int | None
    claimed_mbps: int | None
    """The speed that its driver claims; None for devices without hardware, whose claim means nothing."""


class RdmaPort(TypedDict):
    """One port of an RDMA device."""

    name: str
    is_active: bool
    link_layer: str
    rate: str


class Limits(TypedDict):
    """What the control group, the container or the shell allows."""

    memory_bytes: int | None
    memory_used_bytes: int | None
    cpus: float | None
    pids: int | None
    pids_used: int | None
    memlock_bytes: int | None
    """Memory that a process may lock; None where there is no limit."""
    open_files: int | None


class Node(TypedDict):
    """One node as it tells of itself."""

    address: str
    host: str
    ray_cpus: NotRequired[float]
    ray_gpus: NotRequired[int]
    """What Ray believes the node to have."""
    free_gpus: NotRequired[int]
    """GPUs that Ray can still give away."""
    versions: dict[str, str | None]
    """`python`, `torch`, `ray`, `raybench`; `cuda` that torch was built for, `nccl`, `driver`, `driver_cuda`."""
    num_cpus: int
    memory_bytes: int
    gpus: list[Gpu]
    num_pci_gpus: int
    """NVIDIA GPUs on the PCI bus, with or without a driver."""
    topology: str | None
    """What `nvidia-smi topo -m` prints."""
    interfaces: list[Interface]
    ray_interface: str | None
    rdma: list[RdmaPort]
    environment: dict[str, str]
    """Variables of NCCL, gloo, torch and CUDA in the processes that Ray starts."""
    shm_bytes: int | None
    shm_free_bytes: int | None
    limits: Limits
    acs_bridges: list[str] | None
    """PCI bridges that redirect traffic between GPUs to the CPU; None where they may not be looked at."""
    modules: list[str]
    """Which of `nvidia_peermem`, `gdrdrv`, `nvidia_fs` are loaded."""
    has_open_driver: bool
    """NVIDIA's open kernel modules, which share GPU memory with NICs through DMA-BUF."""
    kernel: str
    is_clock_synchronised: bool | None


class Reach(TypedDict):
    """One node's attempts to connect to another at one of its addresses."""

    source: str
    target: str
    """Nodes, by Ray's addresses."""
    at: str
    """The address of the target that was tried."""
    ports: dict[int, Outcome]
    answered_by: str | None
    """Which node answered there; None if none did."""
    round_trip_ns: int | None
    offset_ns: int | None
    """Add it to a time of `source` to have that of `target`; right to half the round trip."""


class Stream(TypedDict):
    """Data sent from one node to another for about a second."""

    source: str
    target: str
    num_bytes: int
    duration_ns: int


class Collective(TypedDict):
    """One all-reduce among some ranks."""

    stage: Stage
    nodes: list[str]
    """The node of every rank."""
    backend: str
    status: Literal["ok", "failed", "timeout"]
    reason: str | None
    payload_bytes: int
    duration_ns: int | None
    """Median over the repeats of the slowest rank's time."""
    log: str | None
    """What NCCL wrote on the first rank."""


class Examination(TypedDict):
    """Everything; judged by `judge`."""

    nodes: list[Node]
    """Those that answered, the driver's own first."""
    silent: dict[str, str]
    """Why a node did not answer, by its address."""
    lost: list[str]
    """Nodes that Ray has lost without being told to."""
    reaches: list[Reach]
    purposes: dict[str, dict[str, list[str]]]
    """By node and address (or port), what it serves: Ray, gloo, NCCL."""
    streams: list[Stream]
    collectives: list[Collective]
    skipped: list[str]
    """What was not looked at, and why."""


def bits_per_s(stream: Stream) -> float:
    """Goodput of a stream."""
    return stream["num_bytes"] * 8 / stream["duration_ns"] * 1e9 if stream["duration_ns"] else 0.0


def bus_bytes_per_s(collective: Collective) -> float | None:
    """Bus bandwidth of an all-reduce as nccl-tests defines it: 2(n-1)/n of the payload over the time."""
    ranks = len(collective["nodes"])
    if not collective["duration_ns"]:
        return None
    return collective["payload_bytes"] * 2 * (ranks - 1) / ranks / collective["duration_ns"] * 1e9
