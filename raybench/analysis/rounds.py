"""What the steps and operations of one round say, read a round at a time so that large stores fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

if TYPE_CHECKING:
    from raybench.results.reader import Results, RoundKey

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


BYTES = (
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "activation_bytes",
    "peak_device_bytes",
    "peak_rss_bytes",
)


@dataclass(frozen=True)
class RoundMeasures:
    """One round's own numbers; None where it does not have what they are made of."""

    bytes: Mapping[str, int]
    """The largest of any rank by column of `ranks`; without those that no rank has."""
    step_time_p50_s: float | None = None
    """Median over the window's steps of the slowest rank's time."""
    step_time_p95_s: float | None = None
    """95th percentile of the same."""
    communication_fraction: float | None = None
    """Exposed communication ÷ step, mean over ranks and instrumented steps."""


@dataclass(frozen=True)
class _Steps:
    rank: Integers
    step: Integers
    duration_ns: Floats


def measure_round(results: Results, key: RoundKey, mean_step_ns: float) -> RoundMeasures:
    """The measures of a round.

    Args:
        mean_step_ns: mean step of the window, or NaN; stands for instrumented steps that `steps` does not hold.
    """
    steps = _read_steps(results, key)
    operations = results.piece("operations", key, ["rank", "step", "exposed_ns"])
    instrumented = np.empty(0, np.int64) if operations is None else np.unique(_integers(operations, "step"))
    p50, p95 = _percentiles(steps, instrumented)
    fullest = _fullest(results.piece("ranks", key, BYTES))
    return RoundMeasures(fullest, p50, p95, _communication_fraction(operations, steps, mean_step_ns))


def _fullest(ranks: Any) -> dict[str, int]:
    """The largest value of every column, as far as any is known."""
    if ranks is None:
        return {}
    largest = {name: pc.max(ranks.column(name)).as_py() for name in BYTES}
    return {name: value for name, value in largest.items() if value is not None}


def _read_steps(results: Results, key: RoundKey) -> _Steps | None:
    piece = results.piece("steps", key, ["rank", "step", "duration_ns"])
    if piece is None or not piece.num_rows:
        return None
    return _Steps(_integers(piece, "rank"), _integers(piece, "step"), _floats(piece, "duration_ns"))


def _percentiles(steps: _Steps | None, instrumented: Integers) -> tuple[float | None, float | None]:
    if steps is None:
        return None, None
    slowest = _slowest(steps)
    first = int(steps.step.min())
    inside = instrumented[(instrumented >= first) & (instrumented < first + slowest.size)] - first
    slowest[inside] = np.nan
    slowest = slowest[np.isfinite(slowest)]
    if not slowest.size:
        return None, None
    p50, p95 = np.quantile(slowest, [0.5, 0.95]) / 1e9
    return float(p50), float(p95)


def _slowest(steps: _Steps) -> Floats:
    """The longest duration of any rank by step, counted from the first step; NaN where no rank has the step."""
    place = steps.step - steps.step.min()
    longest = np.full(int(place.max()) + 1, -np.inf)
    np.maximum.at(longest, place, np.where(np.isfinite(steps.duration_ns), steps.duration_ns, -np.inf))
    return np.where(np.isinf(longest), np.nan, longest)


def _communication_fraction(operations: Any, steps: _Steps | None, mean_step_ns: float) -> float | None:
    """Each rank's exposed time in each instrumented step, over that step's duration."""
    if operations is None or not operations.num_rows:
        return None
    rank, step = _integers(operations, "rank"), _integers(operations, "step")
    exposed = _floats(operations, "exposed_ns")
    if not np.isfinite(exposed).any():
        return None
    pairs, place = np.unique(np.stack([rank, step]), axis=1, return_inverse=True)
    totals = np.bincount(place.ravel(), weights=np.nan_to_num(exposed), minlength=pairs.shape[1])
    durations = _durations(pairs, steps)
    durations = np.where(np.isfinite(durations), durations, mean_step_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        fractions = totals / durations
    fractions = fractions[np.isfinite(fractions)]
    return float(fractions.mean()) if fractions.size else None


def _durations(pairs: Integers, steps: _Steps | None) -> Floats:
    """Duration of each (rank, step) column of `pairs`, NaN where it is not in the table of steps."""
    found = np.full(pairs.shape[1], np.nan)
    if steps is None:
        return found
    wanted = np.isin(steps.step, pairs[1])
    known = {
        (int(r), int(s)): float(d)
        for r, s, d in zip(steps.rank[wanted], steps.step[wanted], steps.duration_ns[wanted], strict=True)
    }
    for index, (rank, step) in enumerate(pairs.T):
        found[index] = known.get((int(rank), int(step)), np.nan)
    return found


def _integers(piece: Any, column: str) -> Integers:
    return np.asarray(piece.column(column).to_numpy(), dtype=np.int64)


def _floats(piece: Any, column: str) -> Floats:
    return np.asarray(piece.column(column).to_numpy(), dtype=np.float64)
