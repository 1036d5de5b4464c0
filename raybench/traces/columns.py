"""From Kineto's events to columns: parsed strictly and fast, and leniently where an event is not as it should be."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from raybench.traces.events import Events, Kind, Message
from raybench.traces.intervals import Times
from raybench.traces.names import annotation_collective

LIMIT_US = 4e15
"""Times beyond it (the year 2096) are no times."""
MAX_LENIENT_BYTES = 1 << 18
"""What is parsed leniently becomes objects many times its size."""
_LIMIT = 1 << 62
_NO_NUMBER = re.compile(r"(?<=[:\[,\s])-?(?:inf|nan|infinity)\b", re.IGNORECASE)
KINDS = {
    "cpu_op": Kind.CPU_OP,
    "Operator": Kind.CPU_OP,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "Memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "Memset": Kind.MEMSET,
    "cuda_runtime": Kind.LAUNCH,
    "cuda_driver": Kind.LAUNCH,
    "Runtime": Kind.LAUNCH,
    "xpu_runtime": Kind.LAUNCH,
}
"""Categories by the names of every version; others (Python functions, flows, counters) are left out."""


class Arguments(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that are used; the parser passes over all others."""

    correlation: int = -1
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    dtype: str = ""
    group_size: int = msgspec.field(default=-1, name="Group size")
    group_name: str = msgspec.field(default="", name="Process Group Name")
    group_description: str = msgspec.field(default="", name="Process Group Description")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"[]"), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"[]"), name="Input type")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")
    device_type: int = msgspec.field(default=-1, name="Device Type")


_NO_ARGUMENTS = Arguments()


class Event(msgspec.Struct, gc=False):
    """One event as it stands in the file."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: Arguments = _NO_ARGUMENTS


class Columns:
    """Takes events piece by piece."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(list[Event], strict=False).decode
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[int | str, int | str], int] = {}
        self._spoken: set[int] = set()
        """Names that are annotations of communication."""
        self._num_names_seen = 0
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._num_events = 0
        self._messages: list[Message] = []
        self._memory: list[tuple[float, int, int, int]] = []
        self._counts: dict[str, int] = {}

    def parse(self, text: bytes, leniently: bool) -> bool:
        """Take a JSON list of events; False where it is not one, or has to be taken in smaller parts.

        Args:
            leniently: `text` is known to hold whole events: take what can be used of those that are not as they should.
        """
        try:
            events = self._decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = _leniently(text) if leniently else None
            if found is None:
                return False
            self._count("events that are none", found.count(None))
            events = [e for e in found if e is not None]
        self._take(events)
        return True

    def _count(self, what: str, number: int) -> None:
        if number:
            self._counts[what] = self._counts.get(what, 0) + number

    def _take(self, events: list[Event]) -> None:
        self._memory += [
            (e.ts, e.args.allocated, e.args.reserved, e.args.device_type)
            for e in events
            if e.name == "[memory]" and abs(e.ts) < LIMIT_US and 0 <= e.args.allocated < _LIMIT
        ]
        kept = [e for e in events if e.ph == "X" and e.cat in KINDS]
        usable = [e for e in kept if abs(e.ts) < LIMIT_US and abs(e.dur) < LIMIT_US]
        self._count("events without a usable time", len(kept) - len(usable))
        if not usable:
            return
        names, lanes = self._names, self._lanes
        ids = [names.setdefault(e.name, len(names)) for e in usable]
        self._messages += self._messages_of(usable, ids)
        self._parts.append(
            (
                np.array([KINDS[e.cat] for e in usable], np.uint8),
                np.array(ids, np.int32),
                np.array([lanes.setdefault((e.pid, e.tid), len(lanes)) for e in usable], np.int32),
                _nanoseconds([e.ts for e in usable]),
                _nanoseconds([e.dur for e in usable]),
                np.array([c if (c := e.args.correlation) < _LIMIT else -1 for e in usable], np.int64),
            )
        )
        self._num_events += len(usable)

    def _messages_of(self, events: list[Event], ids: list[int]) -> list[Message]:
        spoken, seen, first = self._spoken, self._num_names_seen, self._num_events
        if len(self._names) > seen:
            new = {number: event.name for event, number in zip(events, ids, strict=True) if number >= seen}
            spoken.update(number for number, name in new.items() if annotation_collective(name) is not None)
            self._num_names_seen = len(self._names)
        return [
            _message(first + row, event)
            for row, event in enumerate(events)
            if event.args.collective is not None or ids[row] in spoken
        ]

    def finish(self, base_ns: int) -> Events:
        """All that was taken, on the time base of the trace."""
        kinds, names, lanes, begins, durations, correlations = (
            np.concatenate([part[column] for part in self._parts]) if self._parts else np.empty(0, dtype)
            for column, dtype in enumerate((np.uint8, np.int32, np.int32, np.int64, np.int64, np.int64))
        )
        self._parts.clear()
        self._count("negative durations, taken as 0", int((durations < 0).sum()))
        begins += base_ns
        memory = np.array([[min(value, _LIMIT) for value in row[1:]] for row in self._memory], np.int64).reshape(-1, 3)
        times = _nanoseconds([row[0] for row in self._memory]) + base_ns
        return Events(
            names=list(self._names),
            lanes=list(self._lanes),
            kind=kinds,
            name=names,
            lane=lanes,
            begin=begins,
            end=begins + np.maximum(durations, 0),
            correlation=correlations,
            messages=self._messages,
            memory=np.column_stack([times, memory]),
            counts=self._counts,
        )


def _nanoseconds(microseconds: list[float]) -> Times:
    """Exact for whole microseconds since 1970, which times 1000 would not fit a float."""
    values = np.array(microseconds, np.float64)
    whole = np.floor(values)
    times: Times = whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
    return times


def _leniently(text: bytes) -> list[Event | None] | None:
    """Events that the strict parser refuses, None for each that is none; None where they are to be taken one by one."""
    if len(text) > MAX_LENIENT_BYTES:
        return None
    try:
        found = json.loads(text.decode("utf-8", "replace"), strict=False, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        try:
            found = json.loads(_NO_NUMBER.sub("null", text.decode("utf-8", "replace")), strict=False)
        except (ValueError, RecursionError):
            return None
    return [_convert(value) for value in found]


def _convert(value: Any) -> Event | None:
    for drop in ((), ("args",)):
        try:
            return msgspec.convert({k: v for k, v in value.items() if k not in drop}, Event, strict=False)
        except (msgspec.ValidationError, AttributeError, TypeError, OverflowError):
            continue
    return None


def _message(row: int, event: Event) -> Message:
    a = event.args
    group = a.group_name if a.group_description in ("", "undefined") else f"{a.group_name} ({a.group_description})"
    elements, dtype = a.in_elements, a.dtype
    if a.collective is None:
        elements, dtype = _shape(a.dims, a.types)
    return Message(row, a.collective or "", elements, a.out_elements, dtype, a.group_size, group)


def _shape(dims: msgspec.Raw, types: msgspec.Raw) -> tuple[int, str]:
    """Elements and type of the tensors that an annotation of communication was given; -1 and empty: not told."""
    try:
        shapes, dtypes = msgspec.json.decode(dims), msgspec.json.decode(types)
        sizes = [int(np.prod(shape)) for shape in shapes if shape]
        named = [dtype for dtype, shape in zip(dtypes, shapes, strict=False) if shape]
        return (sum(sizes), str(named[0])) if sizes and len(set(named)) == 1 else (-1, "")
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError):
        return -1, ""
