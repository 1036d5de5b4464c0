"""The tables of the results store: names, columns, types and keys.

Column types are given by the short names below, so that this module needs neither pandas nor pyarrow. Times are int64
nanoseconds, sizes int64 bytes, unknown is null. Within a major version columns are only ever added.
"""

from __future__ import annotations

from typing import Literal

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 3

ColumnType = Literal["text", "int", "float", "bool", "timestamp"]
Status = Literal["ok", "failed", "out_of_memory", "timeout", "crashed", "skipped"]
Gate = Literal["passed", "failed", "not_run"]

STATUSES: tuple[Status, ...] = ("ok", "failed", "out_of_memory", "timeout", "crashed", "skipped")

_KEY: dict[str, ColumnType] = {"suite_id": "text", "track": "text", "case": "text", "round": "int"}

_CIRCUMSTANCES: dict[str, ColumnType] = {
    "backend": "text",
    "device": "text",
    "device_memory_bytes": "int",
    "nccl_version": "text",
    "torch_version": "text",
    "ray_version": "text",
    "python_version": "text",
    "raybench_version": "text",
    "git_commit": "text",
    "git_dirty": "bool",
    "environment": "text",
}
"""What was measured on, and by which code."""

RUNS: dict[str, ColumnType] = {
    **_KEY,
    "attempt": "int",
    "started_at": "timestamp",
    "status": "text",
    "reason": "text",
    "gate": "text",
    "gate_scope": "text",
    "gate_worst_parameter": "text",
    "gate_worst_error": "float",
    "scale": "text",
    "peer": "text",
    "data_strategy": "text",
    "pipeline_strategy": "text",
    "tensor_strategy": "text",
    "data_size": "int",
    "pipeline_size": "int",
    "tensor_size": "int",
    "num_ranks": "int",
    "num_nodes": "int",
    "model": "text",
    "weights": "text",
    "num_parameters": "int",
    "sequence_length": "int",
    "micro_batch_size": "int",
    "num_micro_batches": "int",
    "tokens_per_step": "int",
    "flops_per_token_6n": "float",
    "flops_per_token_non_causal": "float",
    "scaling": "text",
    "micro_batch": "text",
    "precision": "text",
    "tf32": "bool",
    "optimizer": "text",
    "recompute": "text",
    "compiled": "bool",
    "data": "text",
    "seed": "int",
    "workload_hash": "text",
    "num_warmup_steps": "int",
    "num_steps": "int",
    "window_ns": "int",
    "tokens": "int",
    "loss": "float",
    "control_window_ns": "int",
    "control_tokens": "int",
    "gate_ns": "int",
    "build_ns": "int",
    "warmup_ns": "int",
    "instrumented_ns": "int",
    **_CIRCUMSTANCES,
}

RANKS: dict[str, ColumnType] = {
    **_KEY,
    "rank": "int",
    "node": "text",
    "node_rank": "int",
    "local_rank": "int",
    "device_index": "int",
    "clock_offset_ns": "int",
    "clock_error_ns": "int",
    "parameter_bytes": "int",
    "gradient_bytes": "int",
    "optimizer_bytes": "int",
    "activation_bytes": "int",
    "peak_device_bytes": "int",
    "peak_rss_bytes": "int",
    "last_operation": "text",
    "stack": "text",
}

STEPS: dict[str, ColumnType] = {
    **_KEY,
    "rank": "int",
    "step": "int",
    "begin_ns": "int",
    "duration_ns": "int",
    "loss": "float",
    "gradient_norm": "float",
    "tokens": "int",
}

EVALUATIONS: dict[str, ColumnType] = {
    **_KEY,
    "step": "int",
    "loss": "float",
    "accuracy": "float",
    "num_samples": "int",
}

OPERATIONS: dict[str, ColumnType] = {
    **_KEY,
    "rank": "int",
    "sequence": "int",
    "step": "int",
    "kind": "text",
    "label": "text",
    "axis": "text",
    "group_size": "int",
    "payload_bytes": "int",
    "wire_bytes": "int",
    "begin_ns": "int",
    "end_ns": "int",
    "wait_ns": "int",
    "exposed_ns": "int",
    "launch_ns": "int",
}

COLLECTIVES: dict[str, ColumnType] = {
    **_KEY,
    "attempt": "int",
    "started_at": "timestamp",
    "status": "text",
    "reason": "text",
    "setting": "text",
    "group": "text",
    "kind": "text",
    "dtype": "text",
    "payload_bytes": "int",
    "group_size": "int",
    "num_groups": "int",
    "num_nodes": "int",
    "num_repeats": "int",
    "time_ns": "int",
    "p50_ns": "int",
    "p95_ns": "int",
    "p99_ns": "int",
    "num_wrong": "int",
    "algorithm_bandwidth_bytes_per_s": "float",
    "bus_bandwidth_bytes_per_s": "float",
    "interface": "text",
    "link_bytes_per_s": "float",
    "fraction_of_link": "float",
    "network_bytes": "int",
    "loopback_bytes": "int",
    "overlap_slowdown": "float",
    "overlap_compute_slowdown": "float",
    **_CIRCUMSTANCES,
}

TABLES: dict[str, dict[str, ColumnType]] = {
    "runs": RUNS,
    "ranks": RANKS,
    "steps": STEPS,
    "evaluations": EVALUATIONS,
    "operations": OPERATIONS,
    "collectives": COLLECTIVES,
}
TRACK_TABLES = ("runs", "ranks", "steps", "evaluations", "operations")
"""Those of rounds of tracks, each of which has its row in `runs`; `collectives` stands by itself."""
