"""The fit: exact on exact lines, right within its own error on noisy ones, and sane on what is no line."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.analysis.alpha_beta import fit, line_at

SIZES = [8 * 2**k for k in range(28)]


@given(alpha_us=st.floats(1, 1000), gigabytes_per_s=st.floats(0.01, 400))
@settings(max_examples=30, deadline=None)
def test_an_exact_line_is_found_exactly(alpha_us: float, gigabytes_per_s: float) -> None:
    alpha, beta = alpha_us * 1e-6, 1e-9 / gigabytes_per_s
    (line,) = fit(SIZES, [alpha + beta * size for size in SIZES])
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6)
    assert line.beta_s_per_byte == pytest.approx(beta, rel=1e-6)
    assert (line.from_bytes, line.to_bytes) == (8, SIZES[-1])
    assert line.fit_error < 1e-6


def test_noise_is_in_the_error_and_makes_no_ranges() -> None:
    alpha, beta = 20e-6, 1e-9
    ranges, misses = [], []
    for seed in range(40):
        noise = random.Random(seed)
        sizes = SIZES * 3
        lines = fit(sizes, [(alpha + beta * size) * noise.gauss(1, 0.05) for size in sizes])
        ranges.append(len(lines))
        last = lines[-1]
        misses.append(abs(last.beta_s_per_byte - beta) / last.beta_error_s_per_byte)
        assert line_at(lines, 1 << 30).time_s(1 << 30) == pytest.approx(alpha + beta * (1 << 30), rel=0.06)
    assert sum(number == 1 for number in ranges) >= 30
    assert sorted(misses)[len(misses) // 2] < 1.5  # in standard errors: half of them are under 0.7


def test_a_change_of_protocol_makes_a_range() -> None:
    def time_s(size: float) -> float:
        return 5e-6 + size / 2e9 if size < 65536 else 60e-6 + size / 20e9

    lines = fit(SIZES, [time_s(size) for size in SIZES])
    assert [line.to_bytes for line in lines] == [32768, SIZES[-1]]
    assert lines[0].alpha_s == pytest.approx(5e-6, rel=1e-3)
    assert 1 / lines[1].beta_s_per_byte == pytest.approx(20e9, rel=1e-3)
    assert line_at(lines, 10_000) is lines[0]
    assert line_at(lines, 1) is lines[0]
    assert line_at(lines, 1e12) is lines[1]


def test_time_that_does_not_grow_has_no_bandwidth() -> None:
    (line,) = fit([8, 16, 32, 64], [3.1e-5, 3.0e-5, 2.9e-5, 2.8e-5])
    assert line.beta_s_per_byte == 0
    assert line.alpha_s == pytest.approx(2.95e-5, rel=0.01)
    assert line.beta_error_s_per_byte == 0


def test_too_few_sizes() -> None:
    assert fit([], []) == []
    assert fit([8, 8], [1e-5, 1.1e-5]) == []
    (line,) = fit([8, 1000], [1e-5, 2e-5])
    assert math.isnan(line.beta_error_s_per_byte)
    assert line.time_s(1000) == pytest.approx(2e-5)
