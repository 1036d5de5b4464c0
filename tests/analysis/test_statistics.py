"""The interval says as much as the rounds do, and no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.analysis.statistics import MAX_THRESHOLDS, median_interval


def test_one_round_has_no_interval() -> None:
    estimate = median_interval([5.0])
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high, estimate.num_rounds) == (5.0, None, None, 1)
    many_steps = median_interval([1.0, 2.0, 3.0, 4.0, 5.0], [0] * 5)
    assert many_steps is not None
    assert (many_steps.value, many_steps.low) == (3.0, None)


@pytest.mark.parametrize("values", [[], [np.nan], [np.inf, np.nan]])
def test_nothing_finite_is_nothing(values: list[float]) -> None:
    assert median_interval(values) is None


def test_equal_rounds_have_an_interval_without_width() -> None:
    estimate = median_interval([7.0] * 4)
    assert estimate is not None
    assert (estimate.low, estimate.value, estimate.high) == (7.0, 7.0, 7.0)


def test_equal_input_gives_equal_output() -> None:
    values = np.random.default_rng(3).normal(100, 5, 9)
    assert median_interval(values) == median_interval(values)


@pytest.mark.parametrize("num_rounds", [2, 3, 4, 5, 6, 7, 8, 9, 12])
def test_the_interval_holds_the_true_median_as_often_as_it_says(num_rounds: int) -> None:
    generator = np.random.default_rng(num_rounds)
    repeats = 400
    held = 0
    for _ in range(repeats):
        estimate = median_interval(generator.normal(1000.0, 10.0, num_rounds), num_resamples=500)
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 1000.0 <= estimate.high
    # 400 draws at 95 % have a standard deviation of 1.1 %; a plain bootstrap of three rounds holds it in 75 %.
    assert held / repeats >= 0.91


def test_steps_of_one_round_do_not_count_as_rounds() -> None:
    generator = np.random.default_rng(0)
    rounds = np.repeat(np.arange(10), 100)
    values = generator.normal(100, 5, 10)[rounds] + generator.normal(0, 0.1, rounds.size)
    clustered, pooled = median_interval(values, rounds), median_interval(values)
    assert clustered is not None
    assert pooled is not None
    assert clustered.low is not None
    assert clustered.high is not None
    assert pooled.low is not None
    assert pooled.high is not None
    assert clustered.high - clustered.low > 2 * (pooled.high - pooled.low)


def test_every_round_counts_the_same() -> None:
    values = [1.0] * 1000 + [5.0] * 10 + [6.0] * 10
    estimate = median_interval(values, [0] * 1000 + [1] * 10 + [2] * 10)
    assert estimate is not None
    assert estimate.value == 5.0


def test_a_million_steps_are_no_matter() -> None:
    rounds = np.repeat(np.arange(5), 200_000)
    values = np.random.default_rng(0).lognormal(0, 0.1, rounds.size)
    estimate = median_interval(values, rounds)
    assert estimate is not None
    assert estimate.value == pytest.approx(1.0, rel=0.001)
    assert np.unique(values).size > MAX_THRESHOLDS


@given(
    st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=12),
    st.floats(1e-3, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_the_median_is_inside_and_scales(values: list[float], factor: float) -> None:
    estimate = median_interval(values, num_resamples=200)
    assert estimate is not None
    assert estimate.value == pytest.approx(np.median(values))
    if len(values) > 1:
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 < estimate.low <= estimate.value <= estimate.high
        scaled = median_interval([v * factor for v in values], num_resamples=200)
        assert scaled is not None
        assert scaled.low == pytest.approx(estimate.low * factor, rel=1e-6)
