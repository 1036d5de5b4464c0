"""How the loss fell: training loss by step, and what was measured on held-out data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from raybench.results.reader import in_threads

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey

COLUMNS = ("suite_id", "track", "case", "data", "step", "loss", "accuracy")
MAX_POINTS = 300
"""Points a curve; longer ones are thinned evenly, their last point kept."""


def convergence(results: Results) -> pd.DataFrame:
    """One row a case and step: `data` is `train` or `evaluation`; accuracy is NaN for training.

    Of each case's first ok round, since all rounds train from the same seed on the same batches.
    """
    runs = results.runs
    is_ok = (runs.status == "ok") & (runs.gate != "failed")
    first: dict[tuple[str, str, str], RoundKey] = {}
    for key, ok in zip(results.rounds, is_ok, strict=True):
        if ok and (key[:3] not in first or key[3] < first[key[:3]][3]):
            first[key[:3]] = key
    frames = [frame for frame in in_threads(lambda key: _curve(results, key), list(first.values())) if len(frame)]
    if not frames:
        return pd.DataFrame({name: pd.Series(dtype="float64") for name in COLUMNS})
    return pd.concat(frames, ignore_index=True)[list(COLUMNS)]


def _curve(results: Results, key: RoundKey) -> pd.DataFrame:
    parts = []
    if (steps := results.piece("steps", key, ["rank", "step", "loss"])) is not None and steps.num_rows:
        own = steps.filter(pc.equal(steps.column("rank"), pc.min(steps.column("rank"))))
        parts.append(_thinned(own.select(["step", "loss"])).assign(data="train", accuracy=np.nan))
    if (held_out := results.piece("evaluations", key, ["step", "loss", "accuracy"])) is not None and held_out.num_rows:
        parts.append(_thinned(held_out).assign(data="evaluation"))
    whole = pd.concat(parts) if parts else pd.DataFrame()
    return whole.assign(suite_id=key[0], track=key[1], case=key[2])


def _thinned(piece: Any) -> pd.DataFrame:
    frame: pd.DataFrame = piece.to_pandas().dropna(subset="loss").sort_values("step")
    if len(frame) <= MAX_POINTS:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, MAX_POINTS).round().astype(int))]
