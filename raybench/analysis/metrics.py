"""What the tables say about each case, as one tidy row.

Every number is derived in `docs/metrics.md`. A case that failed anywhere has no measurement: a number exists only
where all its rounds are ok, or were before it was interrupted, and no gate failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from raybench.analysis.bubble import bubble
from raybench.analysis.efficiency import CONVENTIONS, SCALING, scaling_columns, utilization
from raybench.analysis.rounds import BYTES, RoundMeasures, measure_round
from raybench.analysis.split import PARTS
from raybench.analysis.statistics import Estimate, Floats, median_interval
from raybench.results.reader import in_threads

if TYPE_CHECKING:
    from raybench.results.reader import Results

CaseKey = tuple[str, str, str]
"""A case by suite, track and name."""

SUMMARY_DTYPES: dict[str, str] = {
    "suite_id": "string",
    "track": "string",
    "case": "string",
    "peer": "string",
    "scale": "string",
    "data_strategy": "string",
    "pipeline_strategy": "string",
    "tensor_strategy": "string",
    "data_size": "Int64",
    "pipeline_size": "Int64",
    "tensor_size": "Int64",
    "num_ranks": "Int64",
    "num_nodes": "Int64",
    "status": "string",
    "reason": "string",
    "gate": "string",
    "gate_scope": "string",
    "gate_worst_parameter": "string",
    "gate_worst_error": "float64",
    "rounds": "Int64",
    "tokens_per_s": "float64",
    "tokens_per_s_low": "float64",
    "tokens_per_s_high": "float64",
    "step_time_s": "float64",
    "step_time_s_low": "float64",
    "step_time_s_high": "float64",
    "ratio_to_control": "float64",
    "ratio_to_control_low": "float64",
    "ratio_to_control_high": "float64",
    "step_time_p50_s": "float64",
    "step_time_p95_s": "float64",
    "communication_fraction": "float64",
    "compute_s": "float64",
    "communication_s": "float64",
    "waiting_s": "float64",
    "optimizer_s": "float64",
    "other_s": "float64",
    "bubble_theory": "float64",
    "bubble_simulated": "float64",
    "bubble_measured": "float64",
    "scaling_baseline": "string",
    "scaling_kind": "string",
    "scaling_efficiency": "float64",
    "scaling_efficiency_low": "float64",
    "scaling_efficiency_high": "float64",
    "mfu_6n": "float64",
    "mfu_non_causal": "float64",
    "peak_flops_per_s": "float64",
    "peak_source": "string",
    "parameter_bytes": "Int64",
    "gradient_bytes": "Int64",
    "optimizer_bytes": "Int64",
    "activation_bytes": "Int64",
    "peak_device_bytes": "Int64",
    "peak_rss_bytes": "Int64",
    "loss": "float64",
    "num_parameters": "Int64",
    "micro_batch": "string",
    "micro_batch_size": "Int64",
    "tokens_per_step": "Int64",
    "num_steps": "Int64",
    "model": "string",
    "precision": "string",
    "backend": "string",
    "device": "string",
    "started_at": "datetime64[us, UTC]",
}
"""Columns and dtypes of `summary`; unknown is NA, in floats NaN."""

DESCRIPTION = (
    "peer",
    "scale",
    "data_strategy",
    "pipeline_strategy",
    "tensor_strategy",
    "data_size",
    "pipeline_size",
    "tensor_size",
    "num_ranks",
    "num_nodes",
    "num_parameters",
    "micro_batch",
    "micro_batch_size",
    "tokens_per_step",
    "num_steps",
    "model",
    "precision",
    "backend",
    "device",
)
BUBBLE = ("bubble_theory", "bubble_simulated", "bubble_measured")


def summary(results: Results) -> pd.DataFrame:
    """One row a case, in the order of its track where that is known; columns as in `SUMMARY_DTYPES`."""
    by_round = _by_round(results)
    bubbles = _bubbles(results)
    groups = results.runs.groupby(["suite_id", "track", "case"], observed=True, sort=False)
    rows = []
    for key, rounds in groups:
        suite_id, track, case = map(str, key)
        row = _case(rounds.sort_values("round"))
        if _has_numbers(row):
            row |= _over_rounds(by_round.get((suite_id, track, case), []), row.get("step_time_s"))
            row |= bubbles.get((suite_id, track, case), {})
        rows.append({"suite_id": suite_id, "track": track, "case": case} | row)
    frame = pd.DataFrame(rows, columns=list(SUMMARY_DTYPES))
    frame["started_at"] = pd.to_datetime(frame.started_at, utc=True)
    frame = _with_scaling(frame, results).astype(SUMMARY_DTYPES)
    suite_start = frame.groupby("suite_id").started_at.transform("min")
    ordered = frame.assign(_suite_start=suite_start, _place=_places(frame, results))
    ordered = ordered.sort_values(["_suite_start", "suite_id", "track", "_place", "started_at", "case"])
    return ordered.drop(columns=["_suite_start", "_place"]).reset_index(drop=True)


def _bubbles(results: Results) -> dict[CaseKey, dict[str, float]]:
    """The columns of `BUBBLE` of every case with a pipeline."""
    columns = {name: name.removeprefix("bubble_") for name in BUBBLE}
    found = bubble(results)
    keys = zip(found.suite_id.astype(str), found.track.astype(str), found.case.astype(str), strict=True)
    values = zip(*([float(v) for v in found[name]] for name in columns.values()), strict=True)
    return {key: dict(zip(columns, row, strict=True)) for key, row in zip(keys, values, strict=True)}


def _with_scaling(frame: pd.DataFrame, results: Results) -> pd.DataFrame:
    """The same with the columns of `SCALING`, each track of a suite by itself."""
    rounds = dict(iter(results.runs.groupby(["suite_id", "track"], observed=True)))
    numbers = frame.astype({n: d for n, d in SUMMARY_DTYPES.items() if d in ("float64", "Int64")})
    tracks = numbers.groupby(["suite_id", "track"], sort=False)
    found = [scaling_columns(cases, rounds[key]).astype(object) for key, cases in tracks]
    return frame.drop(columns=list(SCALING)).join(pd.concat(found))[list(SUMMARY_DTYPES)] if found else frame


def _places(frame: pd.DataFrame, results: Results) -> list[int]:
    """Where each case stands in its track, as far as the suite's request tells."""
    places = []
    for suite_id, track, case in zip(frame.suite_id, frame.track, frame.case, strict=True):
        names = [c.get("name") for c in results.asked(suite_id, track).get("cases", ()) if isinstance(c, dict)]
        places.append(names.index(case) if case in names else len(names))
    return places


def _case(rounds: pd.DataFrame) -> dict[str, Any]:
    """A case's row from its rows in `runs`, without what comes from other tables."""
    row: dict[str, Any] = {name: _first(rounds[name]) for name in DESCRIPTION}
    row["started_at"] = rounds.started_at.min()
    row["gate"] = _gate(rounds)
    row["status"], row["reason"] = _status(rounds, row["gate"])
    gated = rounds[rounds.gate == ("failed" if row["gate"] == "failed" else "passed")]
    worst = gated.gate_worst_error.idxmax() if gated.gate_worst_error.notna().any() else None
    for name in ("gate_scope", "gate_worst_parameter", "gate_worst_error"):
        row[name] = None if worst is None else gated.at[worst, name]
    if worst is None and len(gated):
        row["gate_scope"] = _first(gated.gate_scope)
        row["gate_worst_parameter"] = _first(gated.gate_worst_parameter)
    row["rounds"] = int((rounds.status == "ok").sum())
    if _has_numbers(row):
        row.update(_measured(rounds[rounds.status == "ok"]))
    return row


def _has_numbers(row: Mapping[str, Any]) -> bool:
    """Whether all is well that ran: what was interrupted keeps the rounds that it has."""
    return row["rounds"] > 0 and row["status"] in ("ok", "skipped") and row["gate"] != "failed"


def _gate(rounds: pd.DataFrame) -> str:
    seen = set(rounds.gate.dropna())
    return "failed" if "failed" in seen else "passed" if "passed" in seen else "not_run"


def _status(rounds: pd.DataFrame, gate: str) -> tuple[str, str | None]:
    """Of the first round that is not ok; a round that was never run says less than one that went wrong."""
    bad = rounds[rounds.status != "ok"]
    if bad.empty:
        return ("failed", "the gate failed") if gate == "failed" else ("ok", None)
    ran = bad[bad.status != "skipped"]
    first = (bad if ran.empty else ran).iloc[0]
    return str(first.status), None if pd.isna(first.reason) else str(first.reason)


def _measured(rounds: pd.DataFrame) -> dict[str, Any]:
    """Throughput, step time and ratio to the control: medians over rounds."""
    window_s = _floats(rounds.window_ns) / 1e9
    tokens = _floats(rounds.tokens)
    control_s = _floats(rounds.control_window_ns) / 1e9
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = tokens / window_s
        control = _floats(rounds.control_tokens) / control_s
        measures = {
            "tokens_per_s": rate,
            "step_time_s": window_s / _floats(rounds.num_steps),
            "ratio_to_control": rate / (_floats(rounds.num_ranks) * control),
        }
    row: dict[str, Any] = {}
    for name, values in measures.items():
        row |= _named(name, median_interval(values))
    loss = rounds.loss.dropna()
    row["loss"] = float(loss.iloc[-1]) if len(loss) else None
    row |= utilization({name: _first(rounds[name]) for name in UTILIZED}, row.get("tokens_per_s"))
    for name in BUBBLE:
        if name in rounds and (known := rounds[name].dropna()).size:
            row[name] = float(np.median(known))
    return row


UTILIZED = ("device", "backend", "precision", "tf32", "num_ranks", *(f"flops_per_token_{name}" for name in CONVENTIONS))


def _named(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    if estimate is None:
        return {}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _by_round(results: Results) -> dict[CaseKey, list[RoundMeasures]]:
    """What is made of each round's ranks, steps and operations, by case."""
    means = dict(zip(results.rounds, _floats(results.runs.window_ns) / _floats(results.runs.num_steps), strict=True))
    measures = in_threads(lambda key: measure_round(results, key, means[key]), list(means))
    found: dict[CaseKey, list[RoundMeasures]] = defaultdict(list)
    for key, measured in zip(means, measures, strict=True):
        found[key[:3]].append(measured)
    return found


def _over_rounds(rounds: list[RoundMeasures], step_time_s: float | None) -> dict[str, float]:
    """Medians over rounds, of bytes the largest; the parts of a step in seconds, which sum to it."""
    row: dict[str, float] = {}
    for name in ("step_time_p50_s", "step_time_p95_s"):
        if values := [v for r in rounds if (v := getattr(r, name)) is not None]:
            row[name] = float(np.median(values))
    for name in BYTES:
        if sizes := [r.bytes[name] for r in rounds if name in r.bytes]:
            row[name] = max(sizes)
    splits = [r.split for r in rounds if r.split is not None]
    if splits:
        row["communication_fraction"] = float(np.median([split.exposed for split in splits]))
    if splits and step_time_s is not None:
        known = {part: [v for s in splits if (v := getattr(s, part)) is not None] for part in PARTS}
        shares = {part: float(np.median(values)) for part, values in known.items() if len(values) == len(splits)}
        row |= {f"{part}_s": share * step_time_s / sum(shares.values()) for part, share in shares.items()}
    return row


def _floats(values: Any) -> Floats:
    return np.asarray(values.to_numpy(dtype="float64", na_value=np.nan), dtype=np.float64)


def _first(values: Any) -> Any:
    known = values.dropna()
    return known.iloc[0] if len(known) else None
