"""Made-up ranks' measurements and rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from raybench.comm.sweep import SweepCase
from raybench.worker.messages import RoundRows

ABOUT = {
    "group_size": 2,
    "num_groups": 1,
    "num_nodes": 2,
    "hops": 1,
    "interface": "eth0",
    "link_bytes_per_s": 1.25e9,
    "nccl_version": None,
}
CASE = SweepCase(group="across", kind="all_reduce", dtype="fp32")


def timed(payload: int, duration_ns: int, repeats: int = 10, **more: Any) -> dict[str, Any]:
    """What one rank tells of a size, every repeat taking the same."""
    return {
        "payload_bytes": payload,
        "num_repeats": repeats,
        "window_ns": duration_ns * repeats,
        "durations_ns": [duration_ns] * repeats,
        "num_wrong": 0,
        "num_checked": payload // 4,
        **more,
    }


def parts(*ranks: list[dict[str, Any]], **about: Any) -> dict[int, RoundRows]:
    """Of ranks 0, 1, …"""
    return {
        number: RoundRows(number, CASE.name, 1, len(ranks), {**ABOUT, **about}, collectives=rows)
        for number, rows in enumerate(ranks)
    }


def row(
    payload: int, time_ns: int, *, setting: str = "default", kind: str = "all_reduce", **more: Any
) -> dict[str, Any]:
    """A row of `collectives` as the driver makes it."""
    factor = {"all_reduce": 1.0, "send": 1.0, "all_gather": 0.5}[kind]
    return {
        "setting": setting,
        "group": "across",
        "kind": kind,
        "dtype": "fp32",
        "started_at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=len(setting)),
        "status": "ok",
        "payload_bytes": payload,
        "group_size": 2,
        "num_groups": 1,
        "num_nodes": 2,
        "num_repeats": 10,
        "time_ns": time_ns,
        "p50_ns": time_ns,
        "p95_ns": time_ns + 10,
        "p99_ns": time_ns + 20,
        "num_wrong": 0,
        "algorithm_bandwidth_bytes_per_s": payload / time_ns * 1e9,
        "bus_bandwidth_bytes_per_s": factor * payload / time_ns * 1e9,
        "link_bytes_per_s": 1.25e9,
        "fraction_of_link": factor * payload / time_ns / 1.25,
        "backend": "gloo",
        **more,
    }
