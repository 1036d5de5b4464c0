"""The time of a message or an operation as a straight line of its size, by range of sizes: t = α + β · S.

The model is Hockney's (The communication challenge for MPP, 1994). Libraries change their protocol with the size, so
one line does not do: sizes are cut into up to three ranges, each with a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

MAX_RANGES = 3
MIN_SIZES = 3
"""Of a range: two make a line, a third shows whether it fits."""
NOISE = 0.01
"""Relative: errors of a fit that are smaller are not worth another range."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One range of sizes."""

    from_bytes: int
    to_bytes: int
    """Both sizes were measured."""
    alpha_s: float
    """May be negative in a range that does not begin with the smallest size."""
    beta_s_per_byte: float
    alpha_error_s: float
    """Standard errors; NaN where as many values as unknowns were measured."""
    beta_error_s_per_byte: float
    fit_error: float
    """Root of the mean squared error of the fit, relative to the time."""

    def time_s(self, num_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * num_bytes


def fit(sizes: Sequence[float], times_s: Sequence[float]) -> list[Line]:
    """Lines through measured times, by range of sizes, ascending; none where there are fewer than two sizes.

    Errors count relative to the time, so that small sizes matter as much as large ones. As many ranges are taken as
    Schwarz's criterion (BIC) wants, errors under `NOISE` being none.

    Args:
        sizes: bytes; one size may have several times.
        times_s: above 0.
    """
    x, t = np.asarray(sizes, dtype=float), np.asarray(times_s, dtype=float)
    distinct = np.unique(x)
    if len(distinct) < 2:
        return []
    best: tuple[float, list[Line]] | None = None
    for num_ranges in range(1, max(1, min(MAX_RANGES, len(distinct) // MIN_SIZES)) + 1):
        for cuts in _cuts(len(distinct), num_ranges):
            lines = [_line(x, t, distinct[a], distinct[b - 1]) for a, b in cuts]
            squares = sum(line.fit_error**2 * _num_values(x, line) for line in lines) / len(x)
            score = len(x) * np.log(squares + NOISE**2) + (3 * num_ranges - 1) * np.log(len(x))
            if best is None or score < best[0]:
                best = (score, lines)
    assert best is not None
    return best[1]


def line_at(lines: Sequence[Line], num_bytes: float) -> Line:
    """The line of the range in which a size is, or of the nearest one below; the first for smaller sizes."""
    below = [line for line in lines if line.from_bytes <= num_bytes]
    return below[-1] if below else lines[0]


def _cuts(num_sizes: int, num_ranges: int) -> list[list[tuple[int, int]]]:
    """Every way to cut so many sizes into ranges of at least `MIN_SIZES`, as begins and ends."""
    found = []
    for inner in combinations(range(1, num_sizes), num_ranges - 1):
        bounds = [0, *inner, num_sizes]
        ranges = list(pairwise(bounds))
        if num_ranges == 1 or all(end - begin >= MIN_SIZES for begin, end in ranges):
            found.append(ranges)
    return found


def _num_values(x: Numbers, line: Line) -> int:
    return int(((x >= line.from_bytes) & (x <= line.to_bytes)).sum())


def _line(x: Numbers, t: Numbers, low: float, high: float) -> Line:
    """Weighted least squares over one range; time that falls with the size is noise, and β is 0 then."""
    inside = (x >= low) & (x <= high)
    x, t = x[inside], t[inside]
    design = np.stack([1 / t, x / t], axis=1)
    scale = np.abs(design).max(axis=0)
    solution, *_ = np.linalg.lstsq(design / scale, np.ones_like(t), rcond=None)
    alpha, beta = solution / scale
    used = 2
    if beta < 0:
        alpha, beta, used = float((1 / t).sum() / (1 / t**2).sum()), 0.0, 1
        design, scale = design[:, :1], scale[:1]
    errors = (alpha + beta * x) / t - 1
    alpha_error, beta_error = np.nan, np.nan if used == 2 else 0.0
    if len(t) > used:
        variance = (errors**2).sum() / (len(t) - used)
        covariance = np.linalg.inv((design / scale).T @ (design / scale)) * variance
        deviations = np.sqrt(np.diag(covariance)) / scale
        alpha_error, beta_error = deviations[0], deviations[1] if used == 2 else 0.0
    return Line(
        int(low),
        int(high),
        float(alpha),
        float(beta),
        float(alpha_error),
        float(beta_error),
        float(np.sqrt((errors**2).mean())),
    )
