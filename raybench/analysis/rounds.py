"""What the steps and operations of one round say, read a round at a time so that large stores fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from raybench.analysis.split import COLUMNS, Split, split_round

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
    split: Split | None = None


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
    operations = results.piece("operations", key, COLUMNS)
    instrumented = np.empty(0, np.int64) if operations is None else np.unique(_integers(operations, "step"))
    p50, p95 = _percentiles(steps, instrumented)
    fullest = _fullest(results.piece("ranks", key, BYTES))
    return RoundMeasures(fullest, p50, p95, split_round(operations, _durations(instrumented, steps), mean_step_ns))


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


def _durations(instrumented: Integers, steps: _Steps | None) -> dict[tuple[int, int], float]:
    """Durations by rank and step of the instrumented steps that the table of steps holds."""
    if steps is None or not instrumented.size:
        return {}
    wanted = np.isin(steps.step, instrumented) & np.isfinite(steps.duration_ns)
    columns = zip(steps.rank[wanted], steps.step[wanted], steps.duration_ns[wanted], strict=True)
    return {(int(rank), int(step)): float(duration) for rank, step, duration in columns}


def _integers(piece: Any, column: str) -> Integers:
    return np.asarray(piece.column(column).to_numpy(), dtype=np.int64)


def _floats(piece: Any, column: str) -> Floats:
    return np.asarray(piece.column(column).to_numpy(), dtype=np.float64)
