"""Correct p-values for their number (Benjamini and Hochberg 1995)."""

LEAST_Q = 0.05  # of a result that is by chance


def adjusted(p: list[float]) -> list[float]:
    """Return the q-values of p-values in rising order.

    Among the results with q below `LEAST_Q`, at most this fraction is expected to be by chance.

    >>> adjusted([0.01, 0.02, 0.9])
    [0.03, 0.03, 0.9]
    """
    result, least = [0.0] * len(p), 1.0
    for i in reversed(range(len(p))):
        result[i] = least = min(least, p[i] * len(p) / (i + 1))
    return result
