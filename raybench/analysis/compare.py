"""Two sides of the same suite, case by case: did a change make it faster or slower, or is it noise?

A launch (one suite) is the unit: rounds of one launch share its processes, placement and weather, so that only several
launches tell what repeats. Each side's cases are resampled by launch (a clustered bootstrap) for the standard error of
the ratio, which Student's t with the launches' degrees of freedom widens to the confidence that all cases together
are to have. See `docs/metrics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from raybench.analysis.student import t_quantile
from raybench.results.reader import DEFAULT_RESULTS, load

if TYPE_CHECKING:
    from raybench.results.reader import Results

Floats = npt.NDArray[np.float64]
Verdict = Literal["faster", "slower", "same within noise", "not comparable"]

CONFIDENCE = 0.99
"""That no case of a comparison without any change is called faster or slower."""
MINIMUM_EFFECT = 0.02
"""Changes of the throughput below this are not called faster or slower, however certain they are."""
MIN_LAUNCHES = 3
NUM_RESAMPLES = 4000

IDENTITY: dict[str, tuple[str, ...]] = {
    "hardware": ("device", "device_memory_bytes", "backend", "num_nodes", "num_ranks"),
    "versions": ("torch_version", "nccl_version", "ray_version", "python_version"),
    "workload": (
        "workload_hash", "scale", "tokens_per_step", "data_size", "pipeline_size", "tensor_size", "data_strategy",
        "pipeline_strategy", "tensor_strategy", "num_warmup_steps", "num_steps",
    ),
}  # fmt: skip
"""Columns of `runs` in which both sides have to agree, by what they say."""


@dataclass(frozen=True)
class Comparison:
    """One case on both sides; numbers are None where there is nothing to compare."""

    track: str
    case: str
    verdict: Verdict
    reason: str | None = None
    """Why it is not comparable."""
    is_regression: bool = False
    """Slower, or broken where it was not."""
    base_tokens_per_s: float | None = None
    new_tokens_per_s: float | None = None
    ratio: float | None = None
    """New ÷ base."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    base_launches: int = 0
    new_launches: int = 0


@dataclass(frozen=True)
class _Side:
    """One case on one side."""

    name: str
    runs: pd.DataFrame

    @property
    def failures(self) -> list[str]:
        """What went wrong, a text a launch; none where all launches are fine."""
        found = []
        for _, rounds in self.runs.groupby("suite_id", observed=True):
            bad = rounds[(rounds.status != "ok") | (rounds.gate == "failed")]
            if len(bad):
                first = bad.iloc[0]
                reason = "the gate failed" if pd.isna(first.reason) else str(first.reason)
                found.append(f"{str(first.status).replace('_', ' ')}, {reason}")
        return found

    @property
    def is_broken(self) -> bool:
        """Whether anything went wrong, beyond not being run at all."""
        return bool((~self.runs.status.isin(["ok", "skipped"]) | (self.runs.gate == "failed")).any())

    @property
    def launches(self) -> Floats:
        """Tokens per second of each launch: the median over its rounds."""
        known = self.runs[self.runs.window_ns.notna() & self.runs.tokens.notna()]
        rate = known.tokens.astype("float64") / known.window_ns.astype("float64") * 1e9
        medians = rate.groupby(known.suite_id, observed=True).median()
        return np.asarray(medians, dtype=np.float64)

    def values(self, column: str) -> list[str]:
        return sorted({"none" if pd.isna(value) else str(value) for value in self.runs[column]})


def load_side(text: str) -> Results:
    """One side: a folder, a suite_id in `results/`, or `FOLDER@SUITE_ID`; several suites with commas between them.

    Raises:
        StoreError: it cannot be read.
    """
    place, at, names = text.rpartition("@")
    if "," not in names:
        return load(text)
    chosen = {load(f"{place}{at}{name}").suite_ids[0] for name in names.split(",")}
    return load(place or DEFAULT_RESULTS).only(lambda key: key[0] in chosen)


def compare(base: Results, new: Results) -> list[Comparison]:
    """Every case of either side, in the order of the base."""
    sides = {name: _by_case(name, results) for name, results in (("BASE", base), ("NEW", new))}
    keys = list(dict.fromkeys([*sides["BASE"], *sides["NEW"]]))
    obstacles = {key: _obstacle(sides["BASE"].get(key), sides["NEW"].get(key)) for key in keys}
    num_compared = sum(obstacle is None for obstacle in obstacles.values())
    found = []
    for key in keys:
        ours, theirs, obstacle = sides["BASE"].get(key), sides["NEW"].get(key), obstacles[key]
        if obstacle is None and ours is not None and theirs is not None:
            found.append(_compared(*key, ours.launches, theirs.launches, num_compared))
            continue
        broke = ours is not None and theirs is not None and not ours.failures and theirs.is_broken
        found.append(
            Comparison(
                *key,
                verdict="not comparable",
                reason=obstacle,
                is_regression=broke,
                base_launches=0 if ours is None else ours.launches.size,
                new_launches=0 if theirs is None else theirs.launches.size,
            )
        )
    return found


def ratio_interval(base: Floats, new: Floats, confidence: float, *, seed: int = 0) -> tuple[float, float, float]:
    """New ÷ base, geometric means over launches, with its interval.

    Args:
        base: one positive number a launch; at least two.
        new: likewise.
        confidence: of the interval.
        seed: of the resampling.
    """
    random = np.random.default_rng(seed)
    logs = [np.log(base), np.log(new)]
    ratio = float(logs[1].mean() - logs[0].mean())
    variance = 0.0
    for side in logs:
        means = side[random.integers(0, side.size, (NUM_RESAMPLES, side.size))].mean(axis=1)
        # A bootstrap of n values understates the variance of their mean by (n - 1) / n.
        variance += float(means.var()) * side.size / (side.size - 1)
    arm = t_quantile((1 + confidence) / 2, base.size + new.size - 2) * math.sqrt(variance)
    return math.exp(ratio), math.exp(ratio - arm), math.exp(ratio + arm)


def _compared(track: str, case: str, base: Floats, new: Floats, num_compared: int) -> Comparison:
    ratio, low, high = ratio_interval(base, new, 1 - (1 - CONFIDENCE) / num_compared)
    verdict: Verdict = "same within noise"
    if high < 1 and ratio <= 1 - MINIMUM_EFFECT:
        verdict = "slower"
    elif low > 1 and ratio >= 1 + MINIMUM_EFFECT:
        verdict = "faster"
    means = [float(np.exp(np.log(side).mean())) for side in (base, new)]
    return Comparison(
        track,
        case,
        verdict,
        is_regression=verdict == "slower",
        base_tokens_per_s=means[0],
        new_tokens_per_s=means[1],
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        base_launches=base.size,
        new_launches=new.size,
    )


def _obstacle(base: _Side | None, new: _Side | None) -> str | None:
    """Why two sides of a case cannot be compared, or None."""
    if base is None or new is None:
        return f"only in {'NEW' if base is None else 'BASE'}"
    for side in (base, new):
        if failures := side.failures:
            total = side.runs.suite_id.nunique()
            return f"{side.name} has no measurement in {len(failures)} of {total} launches ({failures[0]})"
    for what, columns in IDENTITY.items():
        for column in columns:
            ours, theirs = base.values(column), new.values(column)
            if ours != theirs:
                return f"{what}: {column} is {_either(ours)} in BASE, {_either(theirs)} in NEW"
            if len(ours) > 1:
                return f"{what}: {column} differs between launches ({_either(ours)})"
    counts = [side.launches.size for side in (base, new)]
    if min(counts) < MIN_LAUNCHES:
        return f"too few launches ({counts[0]} in BASE, {counts[1]} in NEW; at least {MIN_LAUNCHES} suites a side)"
    return None


def _either(values: Sequence[str]) -> str:
    return " or ".join(values)


def _by_case(name: str, results: Results) -> dict[tuple[str, str], _Side]:
    """The cases of one side in the order of their first round."""
    runs = results.runs.sort_values("started_at", kind="stable")
    groups = runs.groupby(["track", "case"], observed=True, sort=False)
    return {(str(track), str(case)): _Side(name, rounds) for (track, case), rounds in groups}
