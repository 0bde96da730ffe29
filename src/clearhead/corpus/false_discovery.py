"""Correct p-values for their number (Benjamini and Hochberg 1995)."""

from collections.abc import Sequence

import numpy as np

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
