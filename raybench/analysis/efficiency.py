"""How well the hardware is used: scaling against the track's own baseline, MFU, and what a million tokens cost."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raybench.analysis.comparison import rates, scaling
from raybench.analysis.peaks import peak_of

CONVENTIONS = ("6n", "non_causal")
"""FLOPs a token, see `raybench.models.flops`."""
CONTROL = "control"
"""Name of the baseline where a track has no smaller layout of the same strategy: one process."""


def utilization(row: dict[str, Any], tokens_per_s: float | None) -> dict[str, Any]:
    """MFU under both conventions and the peak it is a share of; empty where any of it is unknown.

    Args:
        row: a row of `runs`, unknown as None.
    """
    if row["device"] is None or row["backend"] != "nccl" or row["precision"] is None:
        return {}
    peak = peak_of(str(row["device"]), str(row["precision"]), bool(row["tf32"]))
    if peak is None:
        return {}
    found: dict[str, Any] = {"peak_flops_per_s": peak[0], "peak_source": peak[1]}
    for name in CONVENTIONS:
        flops = row[f"flops_per_token_{name}"]
        if tokens_per_s is not None and flops is not None and row["num_ranks"]:
            found[f"mfu_{name}"] = tokens_per_s * flops / (float(row["num_ranks"]) * peak[0])
    return found


def scaling_columns(cases: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Scaling of one track's cases in one suite: rows of `cases` by their index, the columns of `SCALING`.

    Against the track's smallest layout of the same strategies, where it has one, else against the control.

    Args:
        cases: their rows in `summary`, which hold the ratio to the control already.
        runs: the same cases' rounds.
    """
    found = {r.case: (r.other, r.estimate) for r in scaling(cases, rates(runs))}
    measured = _records(cases)
    by_case = {case["case"]: case for case in measured}
    rows = []
    for index, case in zip(cases.index, measured, strict=True):
        row: dict[str, Any] = {"index": index}
        if case["case"] in found:
            other, estimate = found[case["case"]]
            base = by_case[other]
            growth = [case[name] / base[name] for name in ("num_ranks", "tokens_per_step")]
            row |= {"scaling_baseline": other, "scaling_kind": kind_of(*growth), "scaling_efficiency": estimate.value}
            row |= {"scaling_efficiency_low": estimate.low, "scaling_efficiency_high": estimate.high}
        elif pd.notna(case["ratio_to_control"]):
            known = pd.notna(case["data_size"]) and pd.notna(case["num_ranks"])
            row["scaling_kind"] = kind_of(case["num_ranks"], case["data_size"]) if known else None
            row |= {"scaling_baseline": CONTROL, "scaling_efficiency": case["ratio_to_control"]}
            row |= {f"scaling_efficiency_{end}": case[f"ratio_to_control_{end}"] for end in ("low", "high")}
        rows.append(row)
    return pd.DataFrame(rows, columns=["index", *SCALING]).set_index("index")


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


SCALING = (
    "scaling_baseline",
    "scaling_kind",
    "scaling_efficiency",
    "scaling_efficiency_low",
    "scaling_efficiency_high",
)


def kind_of(ranks: float, tokens: float) -> str:
    """What grew with the ranks: the batch (`weak`), nothing (`strong`), or the batch in part (`mixed`).

    Args:
        ranks: of the case ÷ of its baseline.
        tokens: a step, likewise.
    """
    if abs(tokens / ranks - 1) < 1e-6:
        return "weak"
    return "strong" if abs(tokens - 1) < 1e-6 else "mixed"


def cost_per_million_tokens(num_ranks: Any, tokens_per_s: Any, price: float | None) -> float | None:
    """In the currency of `price`, which is that of one rank (one GPU) for an hour; None where anything is unknown."""
    if price is None or pd.isna(num_ranks) or pd.isna(tokens_per_s):
        return None
    return price * float(num_ranks) / 3600 / float(tokens_per_s) * 1e6
