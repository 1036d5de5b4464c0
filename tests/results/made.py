"""Made-up results of a two-rank track, small enough to work out by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raybench.results.store import Results, Writer, load

Row = dict[str, Any]
TRACK = "a-ddp-one-node"
STARTED = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NODE = {"address": "10.0.0.1", "host": "host-1", "num_cpus": 2, "memory_bytes": 24 * 2**30, "gpus": []}
REQUEST = {
    "tracks": [
        {
            "track": TRACK,
            "title": "Data parallelism on one node",
            "question": "Which all-reduce keeps most of two single processes' speed?",
            "cases": [{"name": name} for name in ("naive", "bucketed", "torch-ddp")],
        }
    ]
}


def run_row(**columns: Any) -> Row:
    """A row of `runs`: 10 steps of 1000 tokens in one second, 2 ranks, the control as fast as a rank."""
    return {
        "started_at": STARTED,
        "status": "ok",
        "gate": "passed",
        "gate_scope": "full",
        "gate_worst_parameter": "head.weight",
        "gate_worst_error": 1e-6,
        "scale": "smoke",
        "data_strategy": "bucketed",
        "data_size": 2,
        "pipeline_size": 1,
        "tensor_size": 1,
        "num_ranks": 2,
        "num_nodes": 1,
        "model": "gpt",
        "num_parameters": 17_000_000,
        "sequence_length": 100,
        "micro_batch_size": 5,
        "num_micro_batches": 1,
        "tokens_per_step": 1000,
        "precision": "fp32",
        "tf32": False,
        "optimizer": "adamw lr=0.0003",
        "recompute": "none",
        "compiled": False,
        "num_warmup_steps": 3,
        "num_steps": 10,
        "window_ns": 1_000_000_000,
        "tokens": 10_000,
        "loss": 5.0,
        "control_window_ns": 1_000_000_000,
        "control_tokens": 5_000,
        "instrumented_ns": 200_000_000,
        "backend": "gloo",
        "device": "Some CPU",
        "torch_version": "2.13.0+cpu",
        "ray_version": "2.58.0",
        "python_version": "3.11.9",
        "raybench_version": "0.1.0",
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
        "environment": json.dumps(
            {
                "launcher": "ray",
                "ranks_share_cores": False,
                "nodes": [
                    {"address": "10.0.0.1", "host": "host-1", "num_cpus": 2, "memory_bytes": 24 * 2**30, "gpus": []}
                ],
            }
        ),
        **columns,
    }


def skipped_row(reason: str, **columns: Any) -> Row:
    """A row of a case that never ran."""
    return {"status": "skipped", "reason": reason, "gate": "not_run", "started_at": STARTED, **columns}


def rank_rows(**columns: Any) -> list[Row]:
    return [
        {
            "rank": rank,
            "node": "10.0.0.1",
            "local_rank": rank,
            "parameter_bytes": 68_000_000,
            "gradient_bytes": 68_000_000,
            "optimizer_bytes": 136_000_000 + rank,
            "activation_bytes": 1000,
            "peak_rss_bytes": 900_000_000,
            **columns,
        }
        for rank in range(2)
    ]


def step_rows(durations_ns: Sequence[Sequence[int]], first: int = 0) -> list[Row]:
    """Steps by rank, from their durations."""
    return [
        {"rank": rank, "step": first + index, "begin_ns": 0, "duration_ns": duration, "tokens": 1000}
        for rank, times in enumerate(durations_ns)
        for index, duration in enumerate(times)
    ]


def operation_rows(exposed_ns: Mapping[tuple[int, int], Sequence[int | None]]) -> list[Row]:
    """All-reduces by (rank, step), from the time that each was exposed."""
    return [
        {
            "rank": rank,
            "sequence": sequence,
            "step": step,
            "kind": "all_reduce",
            "axis": "data",
            "group_size": 2,
            "payload_bytes": 1000,
            "wire_bytes": 1000,
            "exposed_ns": exposed,
        }
        for (rank, step), times in exposed_ns.items()
        for sequence, exposed in enumerate(times)
    ]


def write_cases(
    folder: Path, rates: Mapping[str, Sequence[float]], *, suite: str = "suite-1", **columns: Any
) -> Results:
    """A suite of one track, from the tokens per second of every round of every case."""
    writer = Writer(folder, suite, REQUEST)
    for number in range(max(map(len, rates.values()))):
        for index, (case, values) in enumerate(rates.items()):
            if number < len(values):
                run = run_row(window_ns=round(10_000 / values[number] * 1e9), **columns)
                run["started_at"] = STARTED + timedelta(minutes=10 * number + index)
                run["peer"] = "torch" if case.startswith("torch") else None
                writer.write_round(TRACK, case, 1, number, {"runs": [run], "ranks": rank_rows()})
    return load(folder, suite)


def span_row(rank: int, kind: str, begin_ms: float, end_ms: float, label: str | None = None) -> Row:
    """A stretch of a rank's own work in instrumented step 13."""
    begin, end = int(begin_ms * 1e6), int(end_ms * 1e6)
    return {"rank": rank, "sequence": 0, "step": 13, "kind": kind, "label": label, "begin_ns": begin, "end_ns": end}


def recorded_rows(slower: float = 1.0) -> list[Row]:
    """One instrumented step of 100 ms of two ranks: rank 1 comes 5 ms late to the one all-reduce."""
    rows = []
    for rank in range(2):
        late = 5 * rank
        rows += [
            span_row(rank, "step", 0, 100 * slower),
            span_row(rank, "forward", 1, 30 + late),
            span_row(rank, "backward", 30 + late, 75 + late),
            span_row(rank, "optimizer", 92, 98),
        ]
        times = {"begin_ns": int((75 + late) * 1e6), "end_ns": int(90 * slower * 1e6), "wait_ns": int((5 - late) * 1e6)}
        (operation,) = operation_rows({(rank, 13): [int((90 * slower - 75 - late) * 1e6)]})
        rows.append(operation | times)
    return rows


def write_measured(folder: Path, cases: Sequence[str], *, rounds: int = 3, **columns: Any) -> None:
    """A suite of one track with everything that can be recorded; each case is 5 % slower than the one before."""
    writer = Writer(folder, "suite-1", REQUEST)
    for index, case in enumerate(cases):
        slower = 1.05**index
        for number in range(1, rounds + 1):
            window = int(1e9 * slower * (1 + 0.002 * number))
            run = run_row(window_ns=window, peer="torch" if case.startswith("torch") else None, **columns)
            run["started_at"] = STARTED + timedelta(minutes=10 * number + index)
            losses = [{**row, "loss": 7 - 0.1 * row["step"]} for row in step_rows([[10**8] * 10] * 2, first=3)]
            tables = {
                "runs": [run],
                "ranks": rank_rows(node_rank=0),
                "steps": losses,
                "operations": recorded_rows(slower),
                "evaluations": [{"step": 12, "loss": 6.0, "accuracy": 0.5, "num_samples": 16}],
            }
            writer.write_round(TRACK, case, 1, number, tables)
