"""What `nsys export --type sqlite` and `nsys stats --report cuda_gpu_kern_sum --format csv` write."""

from __future__ import annotations

import csv
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raybench.traces.actions import no_actions
from raybench.traces.events import Events, Kind
from raybench.traces.kineto import Trace
from raybench.traces.names import kernel_collective
from raybench.traces.operations import Operation
from raybench.traces.rank import NUM_TOP, RankReport, Top, analyse, no_timeline
from raybench.traces.steps import no_steps
from raybench.traces.stream import UnreadableTraceError

_TABLES: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        Kind.KERNEL,
        ("globalPid", "deviceId", "streamId", "demangledName", "correlationId"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (Kind.MEMCPY, ("globalPid", "deviceId", "streamId", "", "correlationId")),
    "CUPTI_ACTIVITY_KIND_MEMSET": (Kind.MEMSET, ("globalPid", "deviceId", "streamId", "", "correlationId")),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (Kind.LAUNCH, ("globalTid", "globalTid", "", "nameId", "correlationId")),
    "NVTX_EVENTS": (Kind.ANNOTATION, ("globalTid", "globalTid", "", "textId", "")),
}
"""Of each table the columns of process, place (device and stream, or thread), name and correlation."""
_GPU_WORK = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
_ROWS_AT_A_TIME = 100_000
_OWN_IDS = 1 << 40
"""Names that stand in a row instead of the table of strings are numbered from here."""


def report_sqlite(path: Path) -> list[RankReport]:
    """A report for every process with GPU work, in order of its process id.

    Raises:
        UnreadableTraceError: Not a database of nsys, or without GPU work.
        OSError: The file cannot be read.
    """
    with path.open("rb"):
        pass
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            strings = dict(database.execute("SELECT id, value FROM StringIds"))
            found = [(kind, _rows(database, table, columns, strings)) for table, (kind, columns) in _TABLES.items()]
            begin = _first(database, "TARGET_INFO_SESSION_START_TIME", "utcEpochNs") or 0
            device = _first(database, "TARGET_INFO_GPU", "name")
    except (sqlite3.Error, OverflowError, TypeError, ValueError) as error:
        raise UnreadableTraceError(f"not a database that nsys exports ({error})") from None
    working = np.concatenate([rows[:, 2] for kind, rows in found if kind in _GPU_WORK])
    if not working.size:
        raise UnreadableTraceError("no GPU activities in it (nsys profile --trace cuda,nvtx)")
    processes = sorted(set(working.tolist()))
    reports = []
    for process in processes:
        events = _events([(kind, rows[rows[:, 2] == process]) for kind, rows in found], strings, int(begin))
        trace = Trace(
            path=path,
            events=events,
            rank=None,
            world_size=len(processes) if len(processes) > 1 else None,
            backend=None,
            device=None if device is None else str(device),
            unpacked_bytes=path.stat().st_size,
            problems=[f"{number} {what}" for what, number in events.counts.items()],
        )
        reports.append(analyse(trace))
    return reports


def _rows(
    database: sqlite3.Connection, table: str, columns: tuple[str, ...], strings: dict[int, str]
) -> NDArray[np.int64]:
    """Rows of start, end, process, two of place, name and correlation; -1 where a version has no such column."""
    there = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
    if not there:
        return np.empty((0, 7), np.int64)
    wanted = [f"COALESCE({column}, -1)" if column in there else "-1" for column in columns]
    wanted[0] = f"{wanted[0]} >> 24"  # the lowest 24 bits of a global id are the thread
    text = "text" if "text" in there else "NULL"
    cursor = database.execute(f"SELECT start, end, {', '.join(wanted)}, {text} FROM {table} WHERE end IS NOT NULL")
    parts = []
    ids = {value: key for key, value in strings.items()} if text == "text" else {}
    while rows := cursor.fetchmany(_ROWS_AT_A_TIME):
        part = np.array([row[:7] for row in rows], np.int64)
        for place, row in enumerate(rows):
            if row[7] is not None:
                part[place, 5] = ids.setdefault(row[7], len(ids) + _OWN_IDS)
        parts.append(part)
    strings.update({key: value for value, key in ids.items()})
    return np.concatenate(parts) if parts else np.empty((0, 7), np.int64)


def _first(database: sqlite3.Connection, table: str, column: str) -> Any:
    """A value of a table that not every version has."""
    if column not in [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]:
        return None
    row = database.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL").fetchone()
    return row and row[0]


def _events(found: list[tuple[Kind, NDArray[np.int64]]], strings: dict[int, str], begin_ns: int) -> Events:
    rows = np.concatenate([rows for _, rows in found])
    ids, name = np.unique(rows[:, 5], return_inverse=True)
    places, lane = np.unique(rows[:, 3:5], axis=0, return_inverse=True)
    backward = int((rows[:, 1] < rows[:, 0]).sum())
    return Events(
        kind=np.concatenate([np.full(len(rows), kind, np.uint8) for kind, rows in found]),
        name=name.astype(np.int32),
        lane=lane.reshape(-1).astype(np.int32),
        begin=rows[:, 0] + begin_ns,
        end=np.maximum(rows[:, 0], rows[:, 1]) + begin_ns,
        correlation=rows[:, 6],
        names=[strings.get(number, "memory") for number in ids.tolist()],
        lanes=[(first, second) for first, second in places.tolist()],
        messages=[],
        memory=np.empty((0, 4), np.int64),
        counts={"negative durations, taken as 0": backward} if backward else {},
    )


def report_kernel_sums(path: Path) -> RankReport:
    """Sums over kernels alone: no times of day in it, so no idle time, no overlap.

    Raises:
        UnreadableTraceError: Not nsys's table of kernels.
        OSError: The file cannot be read.
    """
    sums = _kernel_sums(path)
    operations = [
        Operation(
            collective=collective,
            begin=0,
            end=time,
            calls=calls,
            payload_bytes=None,
            group="",
            group_size=None,
            label="",
        )
        for name, calls, time in sums
        if (collective := kernel_collective(name)) is not None
    ]
    computing = [(name, calls, time) for name, calls, time in sums if kernel_collective(name) is None]
    top = [
        Top(name=name, kind=kernel_collective(name) or "compute", calls=calls, time_ns=time)
        for name, calls, time in sums
    ]
    return RankReport(
        path=path,
        rank=None,
        world_size=None,
        backend=None,
        device=None,
        case={},
        on_gpu=True,
        unpacked_bytes=path.stat().st_size,
        span_ns=0,
        idle_ns=0,
        compute_ns=0,
        communication_ns=0,
        overlap_ns=0,
        compute_sum_ns=sum(time for _, _, time in computing),
        communication_sum_ns=sum(o.duration_ns for o in operations),
        memory_sum_ns=0,
        operations=operations,
        communication_is_known=True,
        memory=np.empty((0, 3), np.int64),
        top=sorted(top, key=lambda t: t.time_ns, reverse=True)[:NUM_TOP],
        steps=no_steps(),
        actions=no_actions(),
        phases={},
        timeline=no_timeline(),
        problems=["sums of kernels alone: idle time, overlap and waiting are not known"],
    )


def _kernel_sums(path: Path) -> list[tuple[str, int, int]]:
    """Name, calls and nanoseconds of every kernel."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = [line for line in file if line.strip()]
    first = next((i for i, line in enumerate(lines) if "Total Time" in line and "Name" in line), None)
    if first is None:
        raise UnreadableTraceError("not nsys's table of kernels: no line with Total Time and Name")
    found = []
    for row in csv.DictReader(lines[first:]):
        time = next((value for key, value in row.items() if key and key.startswith("Total Time")), None)
        told = (row.get("Name") or "", row.get("Instances") or "", time or "")
        try:
            found.append((told[0], int(told[1].replace(",", "")), int(float(told[2].replace(",", "")))))
        except (ValueError, OverflowError):
            continue
    if not found:
        raise UnreadableTraceError("nsys's table of kernels is empty")
    return found
