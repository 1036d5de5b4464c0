"""Quantiles of Student's t distribution, by which few launches get intervals as wide as they deserve."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

LARGE = 200
"""Degrees of freedom from which on the normal distribution stands for it."""


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t with `degrees` of freedom stays below with `probability`.

    Raises:
        ValueError: a probability outside (0.5, 1), or no degree of freedom.
    """
    if not 0.5 < probability < 1 or degrees < 1:
        raise ValueError(f"probability {probability} (allowed: between 0.5 and 1), degrees {degrees} (at least 1)")
    if degrees > LARGE:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while upper_tail(high, degrees) > 1 - probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if upper_tail(middle, degrees) < 1 - probability else (middle, high)
    return high


def upper_tail(t: float, degrees: int) -> float:
    """P(T > t) for t >= 0, by the finite series of Abramowitz and Stegun (1964), 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine if degrees % 2 else 1.0), 0.0
    for k in range(degrees % 2, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    inside = 2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total
    return (1 - inside) / 2
