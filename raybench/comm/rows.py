"""Rows of `collectives` from what the ranks of one round timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raybench.analysis.communication import bus_factor
from raybench.comm.sweep import SweepCase
from raybench.worker.messages import RoundRows, Row

LEFT_OUT = "left out: its share of the budget is used up (--budget-s)"


def rows_of(case: SweepCase, parts: Mapping[int, RoundRows], *, link_bytes_per_s: float | None = None) -> list[Row]:
    """One row a size, over all ranks.

    Args:
        parts: of every rank that took part.
        link_bytes_per_s: of the link that the groups cross, as it was given; None: as the interfaces say.
    """
    ranks = [parts[rank] for rank in sorted(parts)]
    about = _about(case, [part.ranks for part in ranks], link_bytes_per_s)
    by_size = zip(*(part.collectives for part in ranks), strict=True)
    hops = ranks[0].ranks["hops"]
    return [{**about, **_size(case, about, timed, hops)} for timed in by_size]


def _about(case: SweepCase, told: Sequence[Row], given: float | None) -> Row:
    """What is the same at every size."""
    first = told[0]
    num_nodes = max(row["num_nodes"] for row in told)
    speeds = [row["link_bytes_per_s"] for row in told]
    read = min(speeds) if num_nodes > 1 and all(speeds) else None
    return {
        **case.model_dump(),
        "group_size": first["group_size"],
        "num_groups": first["num_groups"],
        "num_nodes": num_nodes,
        "interface": ", ".join(sorted({row["interface"] for row in told if row["interface"]})) or None,
        "link_bytes_per_s": given or read,
        "nccl_version": first["nccl_version"],
    }


def _size(case: SweepCase, about: Row, timed: Sequence[Row], hops: int) -> Row:
    """What was timed at one size; `hops`: operations, one after the other, of a timed repeat."""
    payload = timed[0]["payload_bytes"]
    repeats = timed[0]["num_repeats"]
    if not repeats:
        return {"payload_bytes": payload, "status": "skipped", "reason": LEFT_OUT}
    row: Row = {"payload_bytes": payload, "num_repeats": repeats, "num_wrong": sum(r["num_wrong"] for r in timed)}
    if row["num_wrong"]:
        checked = sum(r["num_checked"] for r in timed)
        return {**row, "status": "failed", "reason": f"{row['num_wrong']} of {checked} values are wrong"}
    durations = np.concatenate([r["durations_ns"] for r in timed]) / hops
    p50, p95, p99 = (round(float(value)) for value in np.percentile(durations, (50, 95, 99)))
    time_ns = max(r["window_ns"] for r in timed) / repeats / hops
    algorithm = payload / time_ns * 1e9
    bus = algorithm * bus_factor(case.kind, about["group_size"])
    link = about["link_bytes_per_s"]
    launches = repeats * hops * about["num_groups"]
    return {
        **row,
        "status": "ok",
        "time_ns": max(1, round(time_ns)),
        "p50_ns": p50,
        "p95_ns": p95,
        "p99_ns": p99,
        "algorithm_bandwidth_bytes_per_s": algorithm,
        "bus_bandwidth_bytes_per_s": bus,
        "fraction_of_link": bus / link if link else None,
        **{name: _sent(timed, name, launches) for name in ("network_bytes", "loopback_bytes")},
        **{name: _mean(timed, name) for name in ("overlap_slowdown", "overlap_compute_slowdown")},
    }


def _sent(timed: Sequence[Row], name: str, launches: int) -> int | None:
    """Bytes of one operation of one group, over all of its nodes; None where no node's interface told."""
    known = [row[name] for row in timed if row.get(name) is not None]
    return round(sum(known) / launches) if known else None


def _mean(timed: Sequence[Row], name: str) -> float | None:
    known: list[Any] = [row[name] for row in timed if row.get(name) is not None]
    return float(np.mean(known)) if known else None
