"""Intervals of means over texts, within their possible values, and p-values corrected for their
number (Benjamini and Hochberg 1995).
"""

import math
from collections.abc import Sequence

import numpy as np

from ..models.roles.role_tests import t_quantile

MOST_FREE = 1000  # degrees of freedom: beyond, Student's t hardly changes
Limits = tuple[float | None, float | None]


def interval(mean: float, variance: float, texts: int, limits: Limits) -> tuple[float, float]:
    """Return the 95 % interval of a mean over texts, of two or more.

    It has Student's t with one degree of freedom less than texts. `variance` is that of the mean,
    and `limits` are the least and largest possible mean; None for a limit that does not exist.
    """
    return score_interval(mean, variance, t_quantile(min(texts - 1, MOST_FREE)), limits)


def score_interval(mean: float, variance: float, t: float, limits: Limits) -> tuple[float, float]:
    """Return the means μ with |mean - μ| ≤ t · √(variance · V(μ) / V(mean)).

    V(μ) = (μ - a) (b - μ) for the limits a and b: the variance shrinks toward a limit, so that no
    μ is beyond it. V(μ) = μ - a without b, and V = 1 without both, which is the interval of t.

    For fractions, this is the interval of Wilson 1927, with the number of independent queries that
    has this variance (the effective sample size; Korn and Graubard 1998, Survey Methodology 24).
    Both ends are the mean if it is at a limit, or the variance is 0: then no text differs.

    >>> low, high = score_interval(0.1, 0.1 * 0.9 / 50, 1.959964, (0.0, 1.0))
    >>> round(low, 4), round(high, 4)
    (0.0435, 0.2136)
    """
    a, b = limits
    spread = t * t * variance
    if a is None or not spread:
        return mean - math.sqrt(spread), mean + math.sqrt(spread)
    x = mean - a
    if x <= 0 or (b is not None and mean >= b):
        return mean, mean
    # (x - y)² = s y (1 - y / width), for y = μ - a, with 1 / width = 0 without b
    narrow = 0.0 if b is None else 1 / (b - a)
    s = spread / (x * (1 - x * narrow))
    y = x + s / 2 + math.sqrt(spread + s * s / 4)  # times 1 + s / width, the larger solution
    high = a + y / (1 + s * narrow)
    return a + x * x / y, high if b is None else min(high, b)


LEAST_Q = 0.05  # of a result that is by chance


def adjusted(p: Sequence[float]) -> list[float]:
    """Return the q-value of each p-value; NaN for NaN, which is not a test.

    Among the results with q below `LEAST_Q`, at most this fraction is expected to be by chance.

    >>> adjusted([0.9, 0.01, float("nan"), 0.02])
    [0.9, 0.03, nan, 0.03]
    """
    values = np.asarray(p)
    order = np.argsort(values)[: np.isfinite(values).sum()]  # NaN is last
    scaled = values[order] * len(order) / np.arange(1, len(order) + 1)
    q = np.full(len(values), np.nan)
    q[order] = np.minimum.accumulate(scaled[::-1])[::-1]
    return [float(x) for x in q]
