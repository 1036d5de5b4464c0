"""Kineto's traces, as torch.profiler writes them: from torch 1.8 to today, on CUDA, ROCm and CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from raybench.traces.columns import Columns
from raybench.traces.events import Events
from raybench.traces.stream import Surroundings, UnreadableTraceError, pieces

_MAX_BASE_NS = 4 * 10**18


@dataclass(kw_only=True)
class Trace:
    """One rank's trace."""

    path: Path
    events: Events
    rank: int | None
    """None where the file does not tell."""
    world_size: int | None
    backend: str | None
    device: str | None
    """The name of the GPU."""
    case: Mapping[str, Any] = field(default_factory=dict)
    """suite_id, track, case and round of a trace that raybench recorded."""
    unpacked_bytes: int
    problems: list[str] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Read one trace; what is wrong with a part of it stands in `problems`.

    Raises:
        UnreadableTraceError: Nothing in it can be used.
        OSError: The file cannot be read.
    """
    around, columns = Surroundings(), Columns()
    pieces(path, around, columns.parse)
    about = {**_document(around.head, around), **_document(around.tail, around)}
    case = about.get("raybench")
    case = case if isinstance(case, dict) else {}
    base = (_integer(about.get("baseTimeNanoseconds")) or 0) + (_integer(case.get("clock_offset_ns")) or 0)
    events = columns.finish(base if abs(base) < _MAX_BASE_NS else 0)
    counts = [(number, what) for what, number in events.counts.items()]
    if around.lost:
        counts.append((around.lost, "events that are not JSON"))
    problems = [*around.problems, *(f"{number} {what}" for number, what in counts)]
    if events.kind.size == 0 and not len(events.memory):
        raise UnreadableTraceError("; ".join(["no events in it that tell of time", *problems]))
    job = about.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    return Trace(
        path=path,
        events=events,
        rank=_integer(case.get("rank", job.get("rank"))),
        world_size=len(ranks) if isinstance(ranks := case.get("ranks"), list) else _integer(job.get("world_size")),
        backend=job.get("backend") if isinstance(job.get("backend"), str) else None,
        device=_device(about.get("deviceProperties")),
        case=case,
        unpacked_bytes=around.unpacked_bytes,
        problems=problems,
    )


def _document(text: bytes, around: Surroundings) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        around.problems.append("what stands around its events is broken: rank or time base may be missing")
        return {}
    return found if isinstance(found, dict) else {}


def _integer(value: object) -> int | None:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 62 else None


def _device(properties: object) -> str | None:
    try:
        return str(properties[0]["name"])  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return None
