"""Compare two surveys of the same texts: which heads differ, paired by text.

For each head and metric, d is the difference between the means of a text. The interval of its mean
is that of `inference`, with Student's t over texts and d between the limits that a difference has:
-1 and 1 for fractions. Without limits it is the paired t interval. In simulations with 20 texts or
more it contains the true difference in 93 % to 95 % of surveys, and in 89 % if a mean is very near
a limit. With 5 texts these are 92 % and 82 % (`tests/corpus/test_compare.py`).

p is below 0.05 where the interval does not contain 0, and that of the sign test if all d are equal.
The p-values of all rows are corrected by Benjamini and Hochberg 1995: among the rows with q below
0.05, at most 5 % are expected to be by chance.

A small difference may be sure, because each text has it: such is that of rounding, between a model
in float32 and in bfloat16. Its size is `effect`: the difference, divided by the standard deviation
of the means of texts, sqrt((s_1^2 + s_2^2) / 2) (d_av of Lakens 2013); its interval is that of the
difference, divided likewise. They are None if these means do not vary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.formatting import quantity
from ..models.roles.role_tests import t_tail
from .corpus import FOLDER, read_shard
from .fold import sums_of_texts, totals
from .inference import LEAST_Q, MOST_FREE, adjusted, interval
from .manifest import Manifest, read_manifest
from .merge import bins_of
from .state import LayerState
from .tables import Table

COLUMNS = ("layer", "head", "metric", "mean", "other", "difference", "low", "high", "effect",
           "effect_low", "effect_high", "p", "q", "texts")  # fmt: skip
LEAST_EFFECT = 0.2  # a small one (Cohen 1988)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Table):
    """The rows of a comparison.

    Attributes:
        compared: how many heads and metrics have rows, as text.
        left_out: what one or both surveys have, and no row compares, with the reason.
        machines: the dtypes, and the values of the machines, that differ. They change how numbers
            are rounded.
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
                f"Rounding: the surveys have {'; '.join(self.machines)}, so differences of a "
                "small effect may be those of rounding, also where they are sure.",
                "Hint: survey both models in one dtype, on machines that are alike.",
            ]
        return "\n  ".join(lines) if len(lines) > 1 else ""


def compare(one: Path, other: Path) -> Comparison:
    """Return a row for each head and metric of the surveys in two folders.

    ``mean`` and ``other`` are the means of texts, `low` and `high` the 95 % interval of their
    difference, and `effect` is its size, from `effect_low` to `effect_high`. Sure differences are
    first, with q below 0.05, and among these the largest effects. Raises `BadValue` for surveys of
    other tokens or contexts, for two versions of a metric, and without a common head and metric.
    """
    folders = one, other
    manifests = [read_manifest(folder) for folder in folders]
    manifests[0].must_have_read_the_same(manifests[1])
    _must_spell_alike(folders, manifests)
    counts = manifests[0].corpus
    if counts["texts"] - counts["skipped"] < 2:
        rule = "a difference is tested over texts."
        hint = "survey several texts, such as the chapters of a book."
        raise BadValue("The surveys have one text.", rule, hint)
    metrics = [[metric["metric"] for metric in manifest.metrics] for manifest in manifests]
    common = [name for name in metrics[0] if name in metrics[1]]
    at = [[own.index(name) for name in common] for own in metrics]
    layers = [totals(*x, x[1].shards[0]).layers for x in zip(folders, manifests, strict=True)]
    sums = _Pairs(
        {name: _width(manifests[0].metrics[i]) for name, i in zip(common, at[0], strict=True)}
    )
    for a, b in zip(*map(sums_of_texts, folders, manifests), strict=True):
        of_layers = zip(a.sums, a.queries, b.sums, b.queries, strict=False)
        for layer, (sums_a, n_a, sums_b, n_b) in enumerate(of_layers):
            if len(sums_a) == len(sums_b):
                sums.add(layer, sums_a[:, at[0]], n_a[at[0]], sums_b[:, at[1]], n_b[at[1]])
    rows = sums.rows()
    left_out = [*_only_in_one(folders, layers, metrics), *sums.left_out()]
    if not rows:
        gave = f"The surveys have nothing that can be compared: {'; '.join(left_out)}."
        rule = "heads are compared by their layer and number, over the same queries."
        raise BadValue(gave, rule, "compare models of one architecture, with the same metrics.")
    heads, by = len({row[:2] for row in rows}), len({row[2] for row in rows})
    compared = f"{quantity(heads, 'head')}, by {quantity(by, 'metric')}"
    machines = manifests[0].machines_that_differ(manifests[1])
    return Comparison(COLUMNS, tuple(rows), compared, tuple(left_out), tuple(machines))


def _must_spell_alike(folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    """Raise `BadValue` if the tokenizers have two texts for one token of the corpus.

    Random tokens are drawn by number, so those of two vocabularies may be the same numbers.
    """
    if len({manifest.fixed["tokenizer digest"] for manifest in manifests}) == 1:
        return
    for entries in zip(*(manifest.shards for manifest in manifests), strict=True):
        one, other = (
            read_shard(folder / FOLDER / entry.corpus).spelling
            for folder, entry in zip(folders, entries, strict=True)
        )
        for token in one:
            if one[token] != other[token]:
                gave = f"Token {token} is {one[token]!r} in one, and {other[token]!r} in the other."
                rule = "surveys are compared on the same tokens."
                raise BadValue(gave, rule, "compare models of one tokenizer.")


def _only_in_one(
    folders: Sequence[Path], layers: Sequence[list[LayerState]], metrics: Sequence[list[str]]
) -> list[str]:
    """Return the layers and metrics without a counterpart."""
    heads = [[len(layer.sums[0]) for layer in own] for own in layers]
    texts = [
        f"layer {layer}, which has {quantity(a, 'head')} in {str(folders[0])!r} and {b} in "
        f"{str(folders[1])!r}"
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
    """Sums over texts of the means of both surveys, of their difference, and of all squares."""

    def __init__(self, widths: Mapping[str, float | None]) -> None:
        self.metrics, self.widths = list(widths), widths
        # (7, H, M): texts, means, others, d, and the squares of these three
        self._sums: dict[int, np.ndarray] = {}
        self._differ: dict[int, np.ndarray] = {}  # (M,): whether a text has other queries

    def add(self, layer: int, a: Tensor, n_a: Tensor, b: Tensor, n_b: Tensor) -> None:
        mean, other = (x / n.clamp(min=1) for x, n in ((a, n_a), (b, n_b)))
        values = torch.stack([mean, other, mean - other])
        texts = (n_a > 0).expand(1, *mean.shape).double()
        terms = torch.cat([texts, values, values**2]).numpy()
        self._sums[layer] = self._sums.get(layer, 0.0) + terms
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
                k, *of_texts = sums[:, head, metric].tolist()
                mean, other, d = (total / k for total in of_texts[:3])
                variances = [
                    max(squares - k * average**2, 0.0) / (k - 1)
                    for average, squares in zip((mean, other, d), of_texts[3:], strict=True)
                ]
                sd, name = math.sqrt((variances[0] + variances[1]) / 2), self.metrics[metric]
                low, high, p = _interval_and_p(d, variances[2] / k, int(k), self.widths[name])
                size = [x / sd if sd else None for x in (d, low, high)]
                rows.append((layer, head, name, mean, other, d, low, high, *size, p, int(k)))
        corrected = adjusted([row[-2] for row in rows])
        rows = [(*row[:-1], q, row[-1]) for row, q in zip(rows, corrected, strict=True)]
        return sorted(rows, key=_surest_and_largest)


def _surest_and_largest(row: tuple[Any, ...]) -> tuple[Any, ...]:
    difference, effect, q = row[5], row[8], row[-2]
    size = abs(effect) if effect is not None else math.inf if difference else 0.0
    return q >= LEAST_Q, -size, -abs(difference), row[:3]


def _width(metric: dict[str, Any]) -> float | None:
    """Return the largest possible difference of two means; None without one."""
    least, most = bins_of(metric).limits
    return None if least is None or most is None else most - least


def _interval_and_p(
    difference: float, variance: float, texts: int, width: float | None
) -> tuple[float, float, float]:
    """Return the 95 % interval of a mean difference, and the two-sided p-value of 0.

    For 0, the variance is that at a difference of 0, as in `score_interval`. If all differences are
    equal, the p-value is that of the sign test.
    """
    limits = (None, None) if width is None else (-width, width)
    low, high = interval(difference, variance, texts, limits)
    free, shrunk = min(texts - 1, MOST_FREE), 1 - (difference / width) ** 2 if width else 1.0
    if difference == 0:
        return low, high, 1.0
    if not variance or shrunk <= 0:
        return low, high, 2.0**-free
    return low, high, 2 * t_tail(abs(difference) / math.sqrt(variance / shrunk), free)
