"""Compare two surveys of the same texts: which heads differ, paired by text.

For each head and metric, d is the difference between the means of a text. The mean of d has a
paired t test over texts, and the p-values of all rows are corrected by Benjamini and Hochberg 1995:
among the rows with q below 0.05, at most 5 % are expected to be by chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import BadValue
from ..formatting import axis_size
from ..inspection.report.role_tests import t_quantile, t_tail
from .corpus import FOLDER, read_shard
from .false_discovery import adjusted
from .intervals import MOST_FREE
from .manifest import Manifest, machines_that_differ, must_have_read_the_same, read_manifest
from .merge import states, sums_of_texts
from .state import LayerState
from .tables import Table

COLUMNS = ("layer", "head", "metric", "mean", "other", "difference", "low", "high", "p", "q",
           "texts")  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Table):
    """The rows of a comparison.

    Attributes:
        compared: how many heads and metrics have rows, as text.
        left_out: what one or both surveys have, and no row compares, with the reason.
        machines: the values of the machines that differ. They change how numbers are rounded.
    """

    compared: str
    left_out: tuple[str, ...]
    machines: tuple[str, ...]

    @property
    def warning(self) -> str:
        """What is compared, what is not, and a hint; "" if all is compared, on like machines."""
        lines = [f"Compared: {self.compared}."]
        if self.left_out:
            lines += [
                f"Left out: {'; '.join(self.left_out)}.",
                "Hint: survey models of one architecture, with the same metrics.",
            ]
        if self.machines:
            lines += [
                f"Rounding: the surveys have {'; '.join(self.machines)}, so small differences may "
                "be those of rounding.",
                "Hint: survey both models on machines that are alike.",
            ]
        return "\n  ".join(lines) if len(lines) > 1 else ""


def compare(one: Path, other: Path) -> Comparison:
    """Return a row for each head and metric of the surveys in two folders, the smallest p first.

    ``mean`` and ``other`` are the means of texts, `low` and `high` the 95 % interval of their
    difference. Raises `BadValue` for surveys of other tokens or contexts, for two versions of a
    metric, and without a common head and metric.
    """
    folders = one, other
    manifests = [read_manifest(folder) for folder in folders]
    must_have_read_the_same(*manifests)
    _must_spell_alike(folders, manifests)
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
    layers = [next(states(*x)).layers for x in zip(folders, manifests, strict=True)]
    sums = _Pairs(common)
    for a, b in zip(*map(sums_of_texts, folders, manifests), strict=True):
        of_layers = zip(a.sums, a.queries, b.sums, b.queries, strict=False)
        for layer, (sums_a, n_a, sums_b, n_b) in enumerate(of_layers):
            if len(sums_a) == len(sums_b):
                sums.add(layer, sums_a[:, at[0]], n_a[at[0]], sums_b[:, at[1]], n_b[at[1]])
    rows = sums.rows()
    left_out = [*_only_in_one(folders, layers, metrics), *sums.left_out()]
    if not rows:
        raise BadValue(
            f"The surveys have nothing that can be compared: {'; '.join(left_out)}.",
            "heads are compared by their layer and number, over the same queries.",
            "compare models of one architecture, with the same metrics.",
        )
    heads, by = len({row[:2] for row in rows}), len({row[2] for row in rows})
    return Comparison(
        COLUMNS,
        tuple(rows),
        f"{axis_size(heads, 'head')}, by {axis_size(by, 'metric')}",
        tuple(left_out),
        tuple(machines_that_differ(*manifests)),
    )


def _must_spell_alike(folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    """Raise `BadValue` if the tokenizers have two texts for one token of the corpus.

    Random tokens are drawn by number, so those of two vocabularies may be the same numbers.
    """
    if len({manifest.fixed["tokenizer digest"] for manifest in manifests}) == 1:
        return
    for entry in manifests[0].shards:
        one, other = (read_shard(folder / FOLDER / entry.file).spelling for folder in folders)
        for token in one:
            if one[token] != other[token]:
                raise BadValue(
                    f"Token {token} is {one[token]!r} in one survey, and {other[token]!r} in the "
                    "other.",
                    "a difference between surveys is one between models, on the same tokens.",
                    "compare models of one tokenizer.",
                )


def _only_in_one(
    folders: Sequence[Path], layers: Sequence[list[LayerState]], metrics: Sequence[list[str]]
) -> list[str]:
    """Return the layers and metrics without a counterpart."""
    heads = [[len(layer.sums[0]) for layer in own] for own in layers]
    texts = [
        f"layer {layer}, which has {a} heads in {str(folders[0])!r} and {b} in {str(folders[1])!r}"
        for layer, (a, b) in enumerate(zip(*heads, strict=False))
        if a != b
    ]
    for folder, own, theirs in zip(folders, heads, reversed(heads), strict=True):
        if more := range(len(theirs), len(own)):
            texts.append(f"{_of_layers(more)}, only in {str(folder)!r}")
    for folder, names, known in zip(folders, metrics, reversed(metrics), strict=True):
        if alone := [name for name in names if name not in known]:
            texts.append(f"{', '.join(alone)}, only in {str(folder)!r}")
    return texts


def _of_layers(numbers: Sequence[int]) -> str:
    """Write numbers of layers.

    >>> _of_layers([3]), _of_layers([1, 2, 3]), _of_layers([0, 4])
    ('layer 3', 'layers 1 to 3', 'layers 0, 4')
    """
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"layer {first}"
    if last - first == len(numbers) - 1:
        return f"layers {first} to {last}"
    return f"layers {', '.join(map(str, numbers))}"


class _Pairs:
    """Sums over texts of the means of both surveys, of their difference, and of its square."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self.metrics = metrics
        self._sums: dict[int, np.ndarray] = {}  # (5, H, M): texts, means, others, d, d^2
        self._differ: dict[int, np.ndarray] = {}  # (M,): whether a text has other queries

    def add(self, layer: int, a: Tensor, n_a: Tensor, b: Tensor, n_b: Tensor) -> None:
        mean, other = (x / n.clamp(min=1) for x, n in ((a, n_a), (b, n_b)))
        d = mean - other
        terms = [(n_a > 0).expand(d.shape).double(), mean, other, d, d * d]
        stacked = np.stack([x.numpy() for x in terms])
        self._sums[layer] = self._sums.get(layer, 0.0) + stacked
        self._differ[layer] = self._differ.get(layer, False) | (n_a != n_b).numpy()

    def left_out(self) -> list[str]:
        """Return the metrics without rows: of other queries, as masks differ, or of one text."""
        reasons = {
            "is over other queries": self._differ,
            "is of one text": {n: x[0, 0] == 1 for n, x in self._sums.items()},
        }
        texts = []
        for reason, by_layer in reasons.items():
            for number, name in enumerate(self.metrics):
                if layers := [layer for layer, out in by_layer.items() if out[number]]:
                    every = len(layers) == len(by_layer)
                    texts.append(f"{name}{'' if every else f' in {_of_layers(layers)}'} {reason}")
        return texts

    def rows(self) -> list[tuple[Any, ...]]:
        rows = []
        for layer, sums in self._sums.items():
            for head, metric in np.argwhere((sums[0] > 1) & ~self._differ[layer]).tolist():
                texts, mean, other, d, squares = sums[:, head, metric].tolist()
                k, average = int(texts), d / texts
                variance = max(squares - k * average**2, 0.0) / (k - 1)
                error = math.sqrt(variance / k)
                free = min(k - 1, MOST_FREE)
                half = t_quantile(free) * error
                rows.append((
                    layer, head, self.metrics[metric], mean / k, other / k,
                    average, average - half, average + half, _p_value(average, error, free), k,
                ))  # fmt: skip
        rows.sort(key=lambda row: (row[8], -abs(row[5]), row[:3]))
        corrected = adjusted([row[8] for row in rows])
        return [(*row[:9], q, row[9]) for row, q in zip(rows, corrected, strict=True)]


def _p_value(difference: float, error: float, free: int) -> float:
    """Return the two-sided p-value of Student's t; of the sign test if all differences are equal,
    because `error`, the standard error, is then 0."""
    if difference == 0:
        return 1.0
    return 2 * t_tail(abs(difference) / error, free) if error else 2.0**-free
