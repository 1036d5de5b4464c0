"""Which collective a kernel or an annotation is: NCCL of every generation, RCCL, and what torch calls them.

Names of NCCL's kernels have changed with its versions: `ncclAllReduceRingLLKernel_sum_f32` (2.4 to 2.7),
`ncclKernel_AllReduce_RING_LL_Sum_float` (to 2.18), `ncclDevKernel_AllReduce_Sum_f32_RING_LL` (from 2.19) and
`ncclSymkDevKernel_...` (symmetric memory, from 2.27). All-to-all and send/receive share one kernel, and RCCL has one
kernel for everything: there the operation stands in the arguments or in the annotation around the launch.
"""

from __future__ import annotations

import re
from collections.abc import Callable

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "p2p",
    "unknown",
)
"""`p2p`: sends and receives. `unknown`: communication whose operation the trace does not tell."""
SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""No rank can end one of these before the last rank has begun it."""

_LIBRARY_KERNEL = re.compile(r"^(?:void\s+)?(?:nccl|rccl|msccl)\w*kernel", re.IGNORECASE)
_SYMMETRIC_MEMORY = re.compile(r"\b(?:(?:one|two)_shot|multimem(?:_one_shot)?)_(all_reduce|all_gather|reduce_scatter)")
_IN_KERNEL = re.compile(
    r"(AllReduce|ReduceScatter|AllGather|AllToAll|SendRecv|Send|Recv|Broadcast|Reduce|Gather|Scatter)", re.IGNORECASE
)
_KERNEL_TOKENS = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "p2p",
    "send": "p2p",
    "recv": "p2p",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
_ANNOTATION = re.compile(r"^(nccl|rccl|gloo|mpi|ucc|xccl|hccl):(.+)$")
_HOST_BACKENDS = frozenset({"gloo", "mpi", "ucc"})
_SPOKEN = (
    ("allreduce", "all_reduce"),
    ("sparseallreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("monitoredbarrier", "barrier"),
    ("sendrecv", "p2p"),
    ("send", "p2p"),
    ("recv", "p2p"),
    ("receive", "p2p"),
    ("coalesced", "p2p"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
)
_ELEMENT_BYTES = {
    **dict.fromkeys(("bool", "byte", "char", "uint8", "int8", "unsignedchar", "signedchar", "quint8", "qint8"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "int16", "uint16", "float16", "shortint"), 2),
    **dict.fromkeys(("float", "int", "int32", "uint32", "float32", "complexhalf"), 4),
    **dict.fromkeys(("double", "long", "longint", "int64", "uint64", "float64", "complexfloat"), 8),
    "complexdouble": 16,
}
_WIRE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
        lambda n: (n - 1) / n,
    ),
    "p2p": lambda n: 1.0,
}


def kernel_collective(name: str) -> str | None:
    """The collective that a GPU kernel carries out: one of `COLLECTIVES`, or None where it computes.

    NCCL's send/receive kernel, which also does all-to-all, is `p2p` by its name alone; RCCL's generic kernel is
    `unknown`.
    """
    if _LIBRARY_KERNEL.match(name) is None:
        shared = _SYMMETRIC_MEMORY.search(name)
        return shared[1] if shared is not None else None
    found = _IN_KERNEL.search(name.split("(", 1)[0])
    return _KERNEL_TOKENS[found[1].lower()] if found is not None else "unknown"


def spoken_collective(name: str) -> str | None:
    """The collective by torch's own word for it: `allreduce`, `_allgather_base`, `all_to_allv`, `recv 0<-1`."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((collective for prefix, collective in _SPOKEN if plain.startswith(prefix)), None)


def annotation_collective(name: str) -> tuple[str, bool] | None:
    """The collective of an annotation such as `nccl:all_reduce`, and whether the annotation's time is its time.

    It is under gloo, whose annotations end with the operation; under NCCL it is that of the launch.
    """
    found = _ANNOTATION.match(name)
    if found is None:
        return None
    return spoken_collective(found[2]) or "unknown", found[1] in _HOST_BACKENDS


def element_bytes(dtype: str) -> int | None:
    """Bytes of an element of a type as torch or C++ name it: `BFloat16`, `c10::Half`, `long int`, `Float8_e4m3fn`."""
    plain = dtype.lower().removeprefix("c10::").replace(" ", "").replace("_", "")
    return 1 if plain.startswith("float8") else _ELEMENT_BYTES.get(plain)


def wire_factor(collective: str, group_size: int) -> float | None:
    """Bus bandwidth over algorithm bandwidth, of a ring (docs/metrics.md); None where it is not defined."""
    factor = _WIRE_FACTOR.get(collective)
    return factor(group_size) if factor is not None and group_size > 1 else None
