"""`summary.csv`, a row a rank, with the columns of scripts around HolisticTraceAnalysis and ours; `operations.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raybench.traces.actions import PHASES
from raybench.traces.rank import RankReport
from raybench.traces.ranks import Together, bus_bandwidth, by_collective

MIB = 2**20
SHOWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
"""Collectives with columns of their own."""
_ABOUT_COMMUNICATION = frozenset(
    {
        *(
            f"{name}_{what}"
            for name in (*SHOWN, "p2p_kernel", "collective")
            for what in ("time_us", "time_ms", "calls")
        ),
        *("comm_comp_overlap_pctg", "comm_time_us", "comm_overhead_pctg", "communication_time_us"),
        *("exposed_communication_us", "exposed_communication_pctg"),
    }
)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CaseSummary:
    """One case in one window of time."""

    name: str
    """Where its traces lie, or track and case."""
    reports: list[RankReport]
    together: Together
    notes: list[str]

    def rows(self) -> list[Row]:
        """A row a rank; times in microseconds, sizes in MiB, shares in percent, null where unknown."""
        return [_row(self, index, report) for index, report in enumerate(self.reports)]

    def operations(self) -> list[Row]:
        """A row an operation of any rank."""
        return [
            {
                **_origin(self, report),
                "rank": report.rank,
                "collective": o.collective,
                "group": o.group or None,
                "group_size": o.group_size,
                "label": o.label or None,
                "calls": o.calls,
                "begin_ns": o.begin,
                "duration_us": _us(o.duration_ns),
                "waiting_us": None if o.waiting_ns is None else _us(o.waiting_ns),
                "payload_bytes": o.payload_bytes,
            }
            for report in self.reports
            for o in report.operations
        ]


def _origin(case: CaseSummary, report: RankReport) -> Row:
    """What joins a row with the rows of the results store."""
    known = report.case
    return {
        "suite_id": known.get("suite_id"),
        "track": known.get("track"),
        "case": known.get("case", case.name),
        "round": known.get("round"),
    }


def _row(case: CaseSummary, index: int, report: RankReport) -> Row:
    row = {"rank": report.rank, **_breakdown(report), **_collectives(report), **_memory(report)}
    ours = _ours(case.together, index, report)
    if not report.communication_is_known:
        row |= dict.fromkeys(_ABOUT_COMMUNICATION & row.keys())
        ours |= dict.fromkeys(_ABOUT_COMMUNICATION & ours.keys())
    return {
        **row,
        **_origin(case, report),
        "file": str(report.path),
        "device": report.device,
        "world_size": report.world_size,
        "on_gpu": report.on_gpu,
        "begin_ns": report.timeline.begin_ns,
        **ours,
        "problems": "; ".join(report.problems) or None,
    }


def _breakdown(report: RankReport) -> Row:
    non_compute = report.span_ns - report.idle_ns - report.compute_ns
    kernels = report.compute_sum_ns + report.communication_sum_ns + report.memory_sum_ns
    timed = report.span_ns > 0
    return {
        "idle_time_us": _us(report.idle_ns) if timed else None,
        "temporal_compute_time_us": _us(report.compute_ns) if timed else None,
        "non_compute_time_us": _us(non_compute) if timed else None,
        "kernel_time_us": _us(report.span_ns) if timed else None,
        "idle_time_pctg": percent(report.idle_ns, report.span_ns),
        "compute_time_pctg": percent(report.compute_ns, report.span_ns),
        "non_compute_time_pctg": percent(non_compute, report.span_ns),
        "comm_comp_overlap_pctg": percent(report.overlap_ns, report.communication_ns),
        "total_kernel_time_us": _us(kernels),
        "compute_time_us": _us(report.compute_sum_ns),
        "comm_time_us": _us(report.communication_sum_ns),
        "memory_time_us": _us(report.memory_sum_ns),
        "comm_overhead_pctg": percent(report.communication_sum_ns, kernels),
        "compute_time_ms": _us(report.compute_sum_ns) / 1000,
    }


def _collectives(report: RankReport) -> Row:
    found = by_collective(report.operations)
    row: Row = {}
    for name in SHOWN:
        operations = found.get(name, [])
        time = _us(sum(o.duration_ns for o in operations))
        calls = sum(o.calls for o in operations)
        row |= {f"{name}_time_us": time, f"{name}_time_ms": time / 1000, f"{name}_calls": calls}
    others = [o for o in report.operations if o.collective != "p2p"]
    time = _us(sum(o.duration_ns for o in others))
    row |= {
        "collective_calls": sum(o.calls for o in others),
        "collective_time_us": time,
        "collective_time_ms": time / 1000,
    }
    transfers = found.get("p2p", [])
    time = _us(sum(o.duration_ns for o in transfers))
    return row | {
        "p2p_kernel_time_us": time,
        "p2p_kernel_time_ms": time / 1000,
        "p2p_kernel_calls": sum(o.calls for o in transfers),
    }


def _memory(report: RankReport) -> Row:
    row: Row = {"memory_samples": len(report.memory)}
    allocated, reserved = report.memory[:, 1], report.memory[:, 2]
    reserved = reserved[reserved >= 0]
    some = bool(allocated.size)
    median, high = np.percentile(allocated, (50, 95)).tolist() if some else (None, None)
    return row | {
        "peak_allocated_mb": _mb(allocated.max()) if some else None,
        "p50_allocated_mb": _mb(median),
        "p95_allocated_mb": _mb(high),
        "final_allocated_mb": _mb(allocated[-1]) if some else None,
        "peak_reserved_mb": _mb(reserved.max()) if reserved.size else None,
        "final_reserved_mb": _mb(reserved[-1]) if reserved.size else None,
    }


def _ours(together: Together, index: int, report: RankReport) -> Row:
    matched = [o for o in report.operations if o.waiting_ns is not None]
    waiting = sum(o.waiting_ns or 0 for o in matched)
    exposed = report.communication_ns - report.overlap_ns
    steps = report.steps
    lengths = (steps.windows[:, 1] - steps.windows[:, 0]).tolist()
    waited_for = together.waited_for_ns[index]
    bubble = together.bubble[index]
    payloads = [o.payload_bytes for o in report.operations if o.payload_bytes is not None]
    bandwidth = bus_bandwidth(report.operations)
    return {
        "communication_time_us": _us(report.communication_ns),
        "exposed_communication_us": _us(exposed),
        "exposed_communication_pctg": percent(exposed, report.span_ns),
        "waiting_us": _us(waiting) if matched else None,
        "transfer_us": _us(sum(o.duration_ns for o in matched) - waiting) if matched else None,
        "last_to_begin": together.last[index],
        "waited_for_us": None if waited_for is None else _us(waited_for),
        "communication_bytes": sum(payloads) if payloads else None,
        "bus_bandwidth_gb_s": None if bandwidth is None else bandwidth / 1e9,
        "num_steps": len(steps.numbers),
        "step_time_us": _us(float(np.median(lengths))) if lengths else None,
        "launch_wait_us": _us(steps.total_launch_wait_ns) if report.on_gpu else None,
        "launch_wait_pctg": percent(steps.total_launch_wait_ns, report.span_ns) if report.on_gpu else None,
        "launch_bound_steps": len(steps.launch_bound) if report.on_gpu else None,
        **{f"{phase}_us": _us(report.phases[phase]) if phase in report.phases else None for phase in PHASES},
        "pipeline_actions": len(report.actions.kinds),
        "bubble_pctg": None if bubble is None else 100 * bubble,
    }


def as_csv(rows: Sequence[Row]) -> str:
    """Comma-separated, the header first; unknown cells are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["rank"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    return text.getvalue()


def percent(part: float, whole: float) -> float | None:
    """None where there is no whole."""
    return 100 * part / whole if whole > 0 else None


def _us(nanoseconds: float) -> float:
    return nanoseconds / 1000


def _mb(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else float(num_bytes) / MIB
