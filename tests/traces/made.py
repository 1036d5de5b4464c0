"""Small traces of every shape, made by hand; times in microseconds."""

import gzip
import json
from pathlib import Path

DEVICE = 0
BASE_NS = 1_700_000_000_000_000_000


def event(cat, name, ts, dur, *, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name, ts, dur, *, stream=7, cat="kernel", **args):
    return event(cat, name, ts, dur, pid=DEVICE, tid=stream, stream=stream, device=DEVICE, **args)


def launch(ts, correlation, *, dur=1, cat="cuda_runtime", tid=1):
    return event(cat, "cudaLaunchKernel", ts, dur, tid=tid, correlation=correlation)


def annotation(name, ts, dur, *, tid=1, **args):
    return event("user_annotation", name, ts, dur, tid=tid, **args)


def memory(ts, allocated, reserved, device_type=1):
    args = {"Total Allocated": allocated, "Total Reserved": reserved, "Device Type": device_type, "Bytes": 1}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": ts, "pid": 1, "tid": 1, "args": args}


def document(events, *, rank=0, world_size=1, base_ns=BASE_NS, **more):
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Made GPU"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": events,
        "traceName": "made.json",
        "baseTimeNanoseconds": base_ns,
        **more,
    }


def write(path: Path, content, *, indent=None) -> Path:
    """A document, or bytes as they are; packed where the name says so."""
    data = content if isinstance(content, bytes) else json.dumps(content, indent=indent).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
