"""Compare two surveys of the same texts: which heads differ, paired by text.

For each head and metric, d is the difference between the means of a text. The mean of d has a
paired t test over texts, and the p-values of all rows are corrected by Benjamini and Hochberg 1995:
among the rows with q below 0.05, at most 5 % are expected to be by chance.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import BadValue
from ..inspection.report.role_tests import t_quantile, t_tail
from .manifest import must_have_read_the_same, read_manifest
from .merge import MOST_FREE, sums_of_texts
from .tables import Table

LEAST_Q = 0.05  # of a difference that is by chance
COLUMNS = ("layer", "head", "metric", "mean", "other", "difference", "low", "high", "p", "q",
           "texts")  # fmt: skip


def compare(one: Path, other: Path) -> Table:
    """Return a row for each head and metric of the surveys in two folders, the smallest p first.

    ``mean`` and ``other`` are the means of texts, `low` and `high` the 95 % interval of their
    difference. Raises `BadValue` for surveys of other tokens or contexts, for two versions of a
    metric, and without a common head and metric.
    """
    folders = one, other
    manifests = [read_manifest(folder) for folder in folders]
    must_have_read_the_same(*manifests)
    counts = manifests[0].corpus
    if counts["texts"] - counts["skipped"] < 2:
        raise BadValue(
            "The surveys have one text.",
            "a difference is tested over texts.",
            "survey several texts, such as the chapters of a book.",
        )
    metrics = [[metric["metric"] for metric in manifest.metrics] for manifest in manifests]
    common = [name for name in metrics[0] if name in metrics[1]]
    at = [[own.index(name) for name in common] for own in metrics]
    sums = _Pairs()
    for a, b in zip(*map(sums_of_texts, folders, manifests), strict=True):
        layers = zip(a.sums, a.queries, b.sums, b.queries, strict=False)
        for layer, (sums_a, n_a, sums_b, n_b) in enumerate(layers):
            if len(sums_a) == len(sums_b):
                sums.add(layer, sums_a[:, at[0]], n_a[at[0]], sums_b[:, at[1]], n_b[at[1]])
    rows = sums.rows(common)
    if not rows:
        raise BadValue(
            "The surveys have no layer with the same number of heads, or no common metric.",
            "heads are compared by their layer and number.",
            "compare models of one architecture, with the same metrics.",
        )
    return Table(COLUMNS, tuple(rows))


class _Pairs:
    """Sums over texts of the means of both surveys, of their difference, and of its square."""

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}  # (5, H, M): texts, means, others, d, d^2

    def add(self, layer: int, a: Tensor, n_a: Tensor, b: Tensor, n_b: Tensor) -> None:
        both = (n_a > 0) & (n_b > 0)
        mean, other = (x / n.clamp(min=1) for x, n in ((a, n_a), (b, n_b)))
        d = mean - other
        terms = [both.expand(d.shape).double(), mean * both, other * both, d * both, d * d * both]
        stacked = np.stack([x.numpy() for x in terms])
        self._sums[layer] = self._sums.get(layer, 0.0) + stacked

    def rows(self, metrics: list[str]) -> list[tuple[Any, ...]]:
        rows = []
        for layer, sums in self._sums.items():
            for head, metric in np.argwhere(sums[0] > 1).tolist():
                texts, mean, other, d, squares = sums[:, head, metric].tolist()
                k, average = int(texts), d / texts
                variance = max(squares - k * average**2, 0.0) / (k - 1)
                error = math.sqrt(variance / k)
                free = min(k - 1, MOST_FREE)
                half = t_quantile(free) * error
                rows.append((
                    layer, head, metrics[metric], mean / k, other / k,
                    average, average - half, average + half, _p_value(average, error, free), k,
                ))  # fmt: skip
        rows.sort(key=lambda row: (row[8], -abs(row[5]), row[:3]))
        corrected = adjusted([row[8] for row in rows])
        return [(*row[:9], q, row[9]) for row, q in zip(rows, corrected, strict=True)]


def _p_value(difference: float, error: float, free: int) -> float:
    if difference == 0:
        return 1.0
    return 2 * t_tail(abs(difference) / error, free) if error else 0.0


def adjusted(p: list[float]) -> list[float]:
    """Return the q-values of p-values in rising order (Benjamini and Hochberg 1995).

    >>> adjusted([0.01, 0.02, 0.9])
    [0.03, 0.03, 0.9]
    """
    result, least = [0.0] * len(p), 1.0
    for i in reversed(range(len(p))):
        result[i] = least = min(least, p[i] * len(p) / (i + 1))
    return result
