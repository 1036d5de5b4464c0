"""`summary.html`: one page that needs nothing else, for people; the numbers are those of `summary.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from raybench.traces.draw import Drawing, actions, bands, curve
from raybench.traces.operations import Operation
from raybench.traces.rank import RankReport
from raybench.traces.ranks import bus_bandwidth
from raybench.traces.summary import CaseSummary, percent

MAX_RANKS_DRAWN = 32
MISSING = "–"


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Operations of one kind and group, over all ranks."""

    collective: str
    group: str
    calls: int
    time_ms: float
    waiting_ms: float | None
    payload_bytes: int | None
    bandwidth_gb_s: float | None


def render(cases: Sequence[CaseSummary]) -> str:
    """The page of some cases."""
    here = Path(__file__).parent
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=_number, whole=_whole, share=_share, short=_short)
    template = environment.from_string((here / "page.html.j2").read_text(encoding="utf-8"))
    style = (here / "page.css").read_text(encoding="utf-8")
    return template.render(style=style, cases=[_case(case) for case in cases])


def _case(case: CaseSummary) -> dict[str, Any]:
    drawn = case.reports[:MAX_RANKS_DRAWN]
    begin = min((r.timeline.begin_ns for r in drawn if r.timeline.compute.size), default=0)
    end = max((r.timeline.end_ns for r in drawn), default=0)
    straggler = case.together.straggler
    return {
        "name": case.name,
        "notes": case.notes,
        "devices": sorted({report.device or ("GPU" if report.on_gpu else "CPU") for report in case.reports}),
        "rows": case.rows(),
        "straggler": None if straggler is None else case.reports[straggler].rank,
        "span_ms": (end - begin) / 1e6,
        "timelines": [(r.rank, bands(r.timeline, begin, end)) for r in drawn if r.timeline.compute.size],
        "pipeline": _pipeline(drawn),
        "memory": [(r.rank, drawing) for r in drawn if (drawing := curve(r.memory)) is not None],
        "collectives": _collectives(case.reports),
        "top": _top(case.reports),
        "left_out": len(case.reports) - len(drawn),
    }


def _pipeline(reports: Sequence[RankReport]) -> list[tuple[int | None, Drawing]]:
    """The last step's actions of every rank: the first may still be filling caches."""
    some = [report for report in reports if len(report.actions.times)]
    if not some:
        return []
    begins = [r.steps.windows[-1, 0] if len(r.steps.windows) else r.actions.times[0, 0] for r in some]
    begin, end = int(min(begins)), int(max(report.actions.times[:, 1].max() for report in some))
    return [(report.rank, actions(report.actions, begin, end)) for report in some]


def _collectives(reports: Sequence[RankReport]) -> list[CollectiveRow]:
    groups: dict[tuple[str, str], list[Operation]] = {}
    for report in reports:
        for operation in report.operations:
            groups.setdefault((operation.collective, operation.group), []).append(operation)
    rows = [_collective_row(*key, operations) for key, operations in groups.items()]
    return sorted(rows, key=lambda row: row.time_ms, reverse=True)


def _collective_row(collective: str, group: str, operations: list[Operation]) -> CollectiveRow:
    waits = [o.waiting_ns for o in operations if o.waiting_ns is not None]
    payloads = [o.payload_bytes for o in operations if o.payload_bytes is not None]
    bandwidth = bus_bandwidth(operations)
    return CollectiveRow(
        collective=collective,
        group=group,
        calls=sum(o.calls for o in operations),
        time_ms=sum(o.duration_ns for o in operations) / 1e6,
        waiting_ms=sum(waits) / 1e6 if waits else None,
        payload_bytes=sum(payloads) if payloads else None,
        bandwidth_gb_s=None if bandwidth is None else bandwidth / 1e9,
    )


def _top(reports: Sequence[RankReport]) -> list[dict[str, Any]]:
    """Kernels over all ranks, by time."""
    sums: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        for top in report.top:
            entry = sums.setdefault((top.name, top.kind), [0, 0])
            entry[0] += top.calls
            entry[1] += top.time_ns
    whole = sum(r.compute_sum_ns + r.communication_sum_ns + r.memory_sum_ns for r in reports)
    ordered = sorted(sums.items(), key=lambda item: item[1][1], reverse=True)[:20]
    return [
        {"name": name, "kind": kind, "calls": calls, "time_ms": time / 1e6, "share": percent(time, whole)}
        for (name, kind), (calls, time) in ordered
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"


def _whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f} %"


def _short(name: str, length: int = 110) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
