"""Whether a case learns what one process learns: its loss curve against that of the track's case without parallelism.

A case of layout 1 × 1 × 1 in a track with `scaling: strong` trains on the same global batches from the same values, so
that the curves of all cases are the same but for rounding, which training lets grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    from raybench.results.store import Results

BOUND = 0.02
"""Largest deviation that rounding may explain: many times what correct code reaches in 200 steps of fp32 AdamW, and a
fraction of what a gradient that is off by a tenth does. Derived in docs/metrics.md."""
ALONE = ("data_size", "pipeline_size", "tensor_size")
COLUMNS = ("suite_id", "track", "case", "control", "num_steps", "deviation", "leaves")


def curve_deviations(results: Results) -> pd.DataFrame:
    """One row a case whose track has a control: how far its training losses are from the control's.

    `deviation` is the root mean square of the difference over all common steps of the case's first ok round, divided
    by that of the control's losses; `leaves`, whether it is more than `BOUND`.
    """
    runs = results.runs[results.runs.status == "ok"]
    rows = []
    for (suite, track), own in runs.groupby(["suite_id", "track"], observed=True, sort=False):
        alone = own[(own[list(ALONE)] == 1).all(axis="columns")]
        if not len(alone):
            continue
        curves = {case: _curve(results, rounds) for case, rounds in own.groupby("case", observed=True, sort=False)}
        control = str(alone.case.iloc[0])
        reference = own[own.case == control].iloc[0]
        for case, curve in curves.items():
            run = own[own.case == case].iloc[0]
            if case == control or run.tokens_per_step != reference.tokens_per_step or run.seed != reference.seed:
                continue
            both = pd.concat([curve, curves[control]], axis="columns", join="inner", keys=["own", "control"]).dropna()
            if len(both):
                deviation = _deviation(both.own.to_numpy(np.float64), both.control.to_numpy(np.float64))
                rows.append((str(suite), str(track), str(case), control, len(both), deviation, not deviation <= BOUND))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def warnings_of(results: Results) -> list[str]:
    """The cases that have left their control's curve, each in a sentence."""
    found = curve_deviations(results)
    return [
        f"{row.track}:{row.case} does not learn as one process does: over {row.num_steps} steps its loss is off by "
        f"{row.deviation:.1%} of that of {row.control} (allowed: {BOUND:.0%}), whatever its speed"
        for row in found[found.leaves.astype(bool)].itertuples()
    ]


def _curve(results: Results, rounds: pd.DataFrame) -> pd.Series[float]:
    """Loss by step of a case's first round, as its first rank tells it."""
    first = rounds.sort_values("round").iloc[0]
    steps = results.steps
    for column in ("suite_id", "track", "case", "round"):
        steps = steps[steps[column] == first[column]]
    own = steps[steps["rank"] == steps["rank"].min()]
    losses: pd.Series[float] = own.set_index("step").loss.astype("float64")
    return losses


def _deviation(own: NDArray[np.float64], control: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((own - control) ** 2) / np.mean(control**2)))
