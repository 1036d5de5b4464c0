"""The cases as `--json` prints them: the tidy rows, nested and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from raybench.analysis.metrics import BUBBLE, summary

if TYPE_CHECKING:
    from raybench.results.reader import Results


def rows(results: Results) -> list[dict[str, Any]]:
    """One object a case, as `--json` prints it: plain data, null where a number does not apply."""
    return [_row({k: None if pd.isna(v) else v for k, v in row.items()}) for row in _records(results)]


def _records(results: Results) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in summary(results).to_dict("records")]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    peak = row["peak_device_bytes"] if row["peak_device_bytes"] is not None else row["peak_rss_bytes"]
    return {
        "track": row["track"],
        "case": row["case"],
        "peer": row["peer"],
        "layout": {
            "data": row["data_size"],
            "pipeline": row["pipeline_size"],
            "tensor": row["tensor_size"],
            "nodes": row["num_nodes"],
        },
        "strategy": {axis: row[f"{axis}_strategy"] for axis in ("data", "pipeline", "tensor")},
        "status": row["status"],
        "reason": row["reason"],
        "gate": row["gate"],
        "rounds": row["rounds"],
        "tokens_per_s": row["tokens_per_s"],
        "tokens_per_s_low": row["tokens_per_s_low"],
        "tokens_per_s_high": row["tokens_per_s_high"],
        "step_time_s": row["step_time_s"],
        "ratio_to_control": row["ratio_to_control"],
        "bytes": {
            "parameters": row["parameter_bytes"],
            "gradients": row["gradient_bytes"],
            "optimizer": row["optimizer_bytes"],
            "activations": row["activation_bytes"],
            "peak": peak,
        },
        "communication_fraction": row["communication_fraction"],
        "bubble": {name.removeprefix("bubble_"): row[name] for name in BUBBLE},
    }
