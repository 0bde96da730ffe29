"""Propose which keys each KV head of a model can forget, from a survey with the metrics `long`.

A KV head is read by a group of query heads, and a cache drops a key for all of them. So its error
is that of the query head with the largest one, and so is its retrieval score.

The proposal can be written for DuoAttention and KVPress. `tests/corpus/test_kvpress.py` opens both
files with KVPress 0.5.5, which reads the patterns of DuoAttention too: with either, a tiny Llama
has the logits of the masks that a survey proposes. Source of the pattern: `load_attn_pattern` of
github.com/mit-han-lab/duo-attention, November 2026.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.errors import BadValue, as_number, as_path, writable_folder
from ..core.files import atomic_io
from ..core.formatting import quantity
from ..models.inspect.edits import Edit, knock_out
from .long import SINKS, WINDOWS, outside

if TYPE_CHECKING:
    from . import Survey

RECENT = WINDOWS[1]
THRESHOLD = 0.2  # of the error of a streaming head
COPIES = 0.1  # the retrieval score of a head that copies (Wu et al. 2024, arXiv 2404.15574)


class Mean(NamedTuple):
    """The mean of a metric for the query head of a KV head at which it is largest: `head`.

    `low` and `high` are the ends of its interval over texts; both are the mean for one text.
    """

    head: int
    mean: float
    low: float
    high: float


class KeyHead(NamedTuple):
    """A KV head: its error without the keys outside a window, and its retrieval score.

    The score is 0, with a warning, if no text of the survey repeats itself.
    """

    layer: int
    key_head: int
    error: Mean
    retrieval: Mean

    def kind(self, threshold: float = THRESHOLD) -> str:
        """Return "retrieval", "streaming" or "undecided".

        A retrieval head copies, with a score above `COPIES`, or its error is above the threshold. A
        streaming head is below both. An interval that includes one of them decides nothing.
        """
        if self.retrieval.low > COPIES or self.error.low > threshold:
            return "retrieval"
        streams = self.retrieval.high <= COPIES and self.error.high <= threshold
        return "streaming" if streams else "undecided"


@dataclass(frozen=True)
class Budgets:
    """How many keys each KV head keeps of a context.

    Attributes:
        sizes: for each layer, the number of keys of each KV head: the first `SINKS`, and the
            others from the end. `context` means all.
        groups: for each layer, how many query heads read a KV head.
        context: the tokens of a context.
    """

    sizes: dict[int, tuple[int, ...]]
    groups: dict[int, int]
    context: int

    @property
    def fraction(self) -> float:
        """The fraction of keys that are kept at the end of a context."""
        sizes = [size for layer in self.sizes.values() for size in layer]
        return sum(sizes) / (len(sizes) * self.context)

    def uniform(self) -> "Budgets":
        """Return equal budgets for all KV heads, of the same total size."""
        sizes = [size for layer in self.sizes.values() for size in layer]
        size, rest = divmod(sum(sizes), len(sizes))
        equal = iter([size + 1] * rest + [size] * (len(sizes) - rest))
        return replace(self, sizes=_in_layers(self.sizes, equal))

    def edits(self) -> list[Edit]:
        """Return the edits that mask the other keys, for `intervene`."""
        edits: list[Edit] = []
        for layer, sizes in self.sizes.items():
            by_size: dict[int, list[int]] = {}
            group = self.groups[layer]
            for key_head, size in enumerate(sizes):
                heads = range(key_head * group, (key_head + 1) * group)
                by_size.setdefault(size, []).extend(heads)
            edits += [
                knock_out(outside(size - SINKS), layers=[layer], heads=heads)
                for size, heads in by_size.items()
                if size < self.context
            ]
        return edits


def key_heads(survey: "Survey", recent: int = RECENT) -> list[KeyHead]:
    """Return every KV head with its error without the keys outside `SINKS` and `recent`.

    A layer whose own mask is such a window has the error 0. Raises `BadValue` if the survey does
    not have this window.
    """
    errors, scores = _errors(survey), _scores(survey)
    if recent not in errors:
        rule = f"this survey has windows of {', '.join(map(str, errors))} keys."
        hint = "pass one of these, or survey longer contexts."
        raise BadValue(f"recent={recent!r}.", rule, hint)
    return [
        KeyHead(layer, number, errors[recent][layer, number], scores[layer, number])
        for layer, number in scores
    ]


def budgets(survey: "Survey", keep: float) -> Budgets:
    """Divide a fraction `keep` of all keys among the KV heads.

    >>> with ch.intervene(model, survey.budgets(0.25).edits()):  # doctest: +SKIP
    ...     model(ids)

    A KV head with a retrieval score of more than `COPIES` keeps all keys: it needs a text that it
    copies wherever it is, and its error is small, because it seldom copies. The other keys are
    divided so that the sum of errors is least. Between two windows, and between the largest and the
    context, the error is taken as linear; where errors are not convex, it is their convex hull.

    Raises `BadValue` for a survey without the metrics `long`, and if `keep` is too small.
    """
    curves, layout = error_curves(survey), groups_of_layers(survey)
    context = survey.manifest.fixed["context"]
    least = sum(curve[0][0] for curve in curves) / (len(curves) * context)
    written = math.ceil(1000 * least) / 1000
    of = f"heads that copy keep all keys, and others {SINKS + WINDOWS[0]} or more."
    rule = f"keep is the fraction of keys to keep, from {written:.3f} to 1: {of}"
    hint = f"pass for example keep={max(0.5, written)}."
    keep = as_number("keep", keep, rule, hint, lambda x: least <= x <= 1)
    sizes = iter(divide(curves, round(keep * context * len(curves))))
    groups = {layer: group for layer, (_, group) in layout.items()}
    numbers = {layer: range(count) for layer, (count, _) in layout.items()}
    return Budgets(_in_layers(numbers, sizes), groups, context)


def _in_layers(
    layers: Mapping[int, Sequence[Any]], sizes: Iterator[int]
) -> dict[int, tuple[int, ...]]:
    """Distribute numbers to layers with this number of elements."""
    return {layer: tuple(next(sizes) for _ in of) for layer, of in layers.items()}


def divide(curves: Sequence[Sequence[tuple[int, float]]], total: int) -> list[int]:
    """Divide `total` keys among KV heads with the least sum of errors.

    Each curve has sizes and errors, both convex: the steepest segments come first.

    >>> divide([[(20, 0.5), (100, 0.0)], [(20, 0.1), (100, 0.0)]], 140)
    [100, 40]
    """
    sizes = [curve[0][0] for curve in curves]
    left = total - sum(sizes)
    segments = sorted(
        ((b[1] - a[1]) / (b[0] - a[0]), a[0], number, b[0])
        for number, curve in enumerate(curves)
        for a, b in pairwise(curve)
    )
    for _, _, number, end in segments:
        more = min(left, end - sizes[number])
        sizes[number] += more
        left -= more
    return sizes


def hull(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points of the lower convex hull.

    >>> hull([(20, 0.5), (68, 0.6), (260, 0.1), (1024, 0.0)])
    [(20, 0.5), (260, 0.1), (1024, 0.0)]
    """
    chain: list[tuple[int, float]] = []
    for x, y in points:
        while len(chain) > 1:
            (x0, y0), (x1, y1) = chain[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            chain.pop()
        chain.append((x, y))
    return chain


def error_curves(survey: "Survey") -> list[list[tuple[int, float]]]:
    """Return the errors of each KV head by the number of keys that it keeps, as convex curves."""
    context = survey.manifest.fixed["context"]
    errors, scores = _errors(survey), _scores(survey)
    return [
        [(context, 0.0)]
        if score.mean > COPIES
        else hull([*((SINKS + n, of[key].mean) for n, of in errors.items()), (context, 0.0)])
        for key, score in scores.items()
    ]


def groups_of_layers(survey: "Survey") -> dict[int, tuple[int, int]]:
    """Return for each layer its number of KV heads, and of query heads that read each."""
    rows = survey.query(
        "select layer, count(distinct key_head), count(distinct head) from heads group by layer "
        "order by layer"
    ).rows
    return {layer: (G, H // G) for layer, G, H in rows}


def known_windows(survey: "Survey") -> list[int]:
    """Return the windows whose errors the survey has, the smallest first."""
    known = survey.query("select distinct metric from heads where metric like 'error_%'").rows
    return [size for size in WINDOWS if (f"error_{size}",) in known]


def _errors(survey: "Survey") -> dict[int, dict[tuple[int, int], Mean]]:
    """Return the error of each KV head, for each window outside which a text has keys.

    Raises `BadValue` without one, and for a model that looks ahead, which has no such cache.
    """
    _must_not_look_ahead(survey)
    errors = {size: _largest(survey, f"error_{size}") for size in known_windows(survey)}
    if not errors:
        rule = f"'long' compares key heads on texts of more than {SINKS + WINDOWS[0]} tokens."
        hint = 'survey such texts with metrics="long".'
        raise BadValue("The survey has no errors of windows.", rule, hint)
    return errors


def _must_not_look_ahead(survey: "Survey") -> None:
    """Raise `BadValue` if more queries lose keys to the smallest window than in a causal model."""
    context, least = survey.manifest.fixed["context"], SINKS + WINDOWS[0]
    (most,) = survey.query(
        f"select sum((contexts - 1) * {context - least} + "
        f"greatest(tokens - (contexts - 1) * {context} - {least}, 0)) from texts"
    ).rows[0]
    (queries,) = survey.query(
        "select coalesce(max(queries), 0) from heads where metric = ?", [f"outside_{WINDOWS[0]}"]
    ).rows[0]
    if queries > most:
        gave = f"{survey.manifest.fixed['model']} looks ahead: it is not causal."
        rule = "budgets are of the keys that a cache keeps while a model generates."
        hint = "survey a model that generates; the table heads has the numbers of this one."
        raise BadValue(gave, rule, hint)


def _scores(survey: "Survey") -> dict[tuple[int, int], Mean]:
    """Return the retrieval score of each KV head, with a warning if it was not measured."""
    if not survey.query("select 1 from heads where metric = 'retrieval' limit 1"):
        advice = "survey longer texts, or Needles."
        known = "No text of the survey repeats earlier text, so no head is known to copy"
        warnings.warn(f"{known}: {advice}", stacklevel=4)
    return _largest(survey, "retrieval")


def _largest(survey: "Survey", metric: str) -> dict[tuple[int, int], Mean]:
    """Return the mean of the query head with the largest one, by layer and KV head.

    It is 0 for a layer without such a query.
    """
    rows = survey.query(
        "select layer, key_head, head, mean, coalesce(low, mean), coalesce(high, mean) from heads "
        "where metric = ? order by layer, key_head, mean desc, head",
        [metric],
    ).rows
    largest = {of: Mean(*next(group)[2:]) for of, group in groupby(rows, itemgetter(0, 1))}
    return {
        (layer, number): largest.get((layer, number), Mean(number * group, 0.0, 0.0, 0.0))
        for layer, (count, group) in groups_of_layers(survey).items()
        for number in range(count)
    }


RATIOS = 99  # compression ratios of KVPress: 0.01 to 0.99


def export_duo_attention(survey: "Survey", folder: str | Path, recent: int = RECENT) -> Path:
    """Write KV heads as a pattern of DuoAttention, and return the folder.

    ``full_attention_heads.tsv`` has a row for each layer, with a number from 0 to 1 for each KV
    head: 1 for a head that copies, and the error of another. Choose the fraction of streaming heads
    (`sparsity` there): the numbers are not the gates that DuoAttention trains, so its threshold 0.5
    means something else. ``config.json`` has the sizes of sinks and window.

    Raises `BadValue` for a model of one layer, or of one KV head in a layer: its pattern would be
    a row or a column, which ``numpy.loadtxt`` there reads as a list of numbers.
    """
    heads = key_heads(survey, recent)
    _must_be_regular(survey, "a pattern of DuoAttention")
    numbers = [1.0 if x.retrieval.mean > COPIES else min(x.error.mean, 1.0) for x in heads]
    count, _ = groups_of_layers(survey)[0]
    if count == 1 or len(numbers) == count:
        layers = quantity(len(numbers) // count, "layer")
        rule = "a pattern of DuoAttention is a table of several layers and several key heads."
        hint = "use survey.budgets(keep) or survey.export_kvpress(path)."
        raise BadValue(f"The survey has {layers} of {quantity(count, 'key head')}.", rule, hint)
    rows = [numbers[start : start + count] for start in range(0, len(numbers), count)]
    text = "\n".join("\t".join(f"{x:.6f}" for x in row) for row in rows)
    out = writable_folder(folder, "a pattern is")
    atomic_io.replace(out / "full_attention_heads.tsv", f"{text}\n".encode())
    atomic_io.write_json(out / "config.json", {"sink_size": SINKS, "recent_size": recent})
    return out


def export_kvpress(survey: "Survey", path: str | Path) -> Path:
    """Write budgets as a curve for `LUKVPress` of KVPress, and return the path, an .npy file.

    >>> press = LUKVPress(scorer, compression_ratio=0.5)  # doctest: +SKIP
    >>> press._budget_curves = np.load(path)  # otherwise it downloads a curve  # doctest: +SKIP

    It has the fractions of keys to drop, (99, layers, KV heads), for the total fractions 0.01 to
    0.99. Where `budgets` refuses so few keys, all heads keep equally many. KVPress chooses the keys
    of a budget by its own scores, and not by position.

    Raises `BadValue` for layers with different numbers of KV heads, for a survey without the
    metrics of `long`, and for a path that cannot be written.
    """
    _must_be_regular(survey, "a curve of KVPress")
    curves, (G, _) = error_curves(survey), groups_of_layers(survey)[0]
    context, n = survey.manifest.fixed["context"], len(curves)
    dropped = np.empty((RATIOS, n), dtype=np.float32)
    for row in range(RATIOS):
        total = round((1 - (row + 1) / (RATIOS + 1)) * context * n)
        enough = total >= sum(curve[0][0] for curve in curves)
        sizes = np.array(divide(curves, total)) if enough else np.full(n, total / n)
        dropped[row] = 1 - sizes / context
    content = BytesIO()
    np.save(content, dropped.reshape(RATIOS, -1, G))
    return atomic_io.replace(as_path("export_kvpress", path), content.getvalue())


def _must_be_regular(survey: "Survey", what: str) -> None:
    counts = {layer: count for layer, (count, _) in groups_of_layers(survey).items()}
    if len({*counts.values()}) > 1 or [*counts] != [*range(len(counts))]:
        layers, heads = (", ".join(map(str, x)) for x in (counts, counts.values()))
        rule = f"{what} has the same number of key heads in every layer."
        hint = "write survey.key_heads() in a format of your own."
        raise BadValue(f"The layers {layers} have {heads} key heads.", rule, hint)
