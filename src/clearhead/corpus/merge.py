"""Fold the states of all shards into the tables, in the order of the shards.

The result does not depend on the order in which workers finished. Each part of a state is read
once: first the totals, then the sums of texts, for their deviations from the means. The memory does
not grow with the corpus, and the time grows with the number of shards.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.files import atomic_io
from ..core.formatting import quantity
from . import corpus, mixes, state
from .corpus import read_shard
from .examples import largest, last_hashes, rows_of_layer, sampled
from .groups import Pile, first_of_groups
from .inference import interval
from .looks import NAMES as CLASS_NAMES
from .manifest import Manifest, ShardEntry, read_manifest
from .metric import Bins, slices_of
from .state import LayerState, State
from .tables import DESCRIPTION, QUANTILES, SCHEMA, Columns, digest_of_tables, write_table
from .token_counts import QUERY, merged

# A text may continue in later shards.
TEXTS = (
    "select text, any_value(name) as name, sum(contexts)::int as contexts, "
    "sum(tokens)::bigint as tokens from rows group by text order by text"
)
MOST_TOKENS = 100  # rows of a head and side in the table of tokens, by lift and by count
ANY = Bins(bounds=(None, None))  # of numbers without limits
LEAST_COUNT = 5  # links of a token with a lift


def missing_shards(out: Path, manifest: Manifest) -> list[int]:
    """Return the numbers of the shards without a complete state."""
    return [
        number
        for number, entry in enumerate(manifest.shards)
        if not state.is_state_of(out / state.FOLDER / entry.state, manifest.origin(entry))
    ]


def must_be_finished(out: Path, manifest: Manifest) -> None:
    """Raise `BadValue` if a shard has no complete state of its own."""
    if missing := missing_shards(out, manifest):
        path = out / state.FOLDER / manifest.shards[missing[0]].state
        raise BadValue(
            f"{str(out)!r} lacks {len(missing)} of {quantity(len(manifest.shards), 'shard')}: "
            f"{str(path)!r} is missing, incomplete, or the state of another shard.",
            "a survey can be opened when all shards are finished and merged.",
            "run the same survey again, which computes the missing shards, and merges.",
        )


def are_merged(out: Path, manifest: Manifest) -> bool:
    """Return whether the tables are those of all shards."""
    return read_manifest(out).digest == manifest.digest == digest_of_tables(out)


def merge(out: Path, prepared: Manifest | None = None) -> Path:
    """Write the tables of a survey.

    Raises `BadValue` if a shard is not finished, and if the survey is not the one that was
    `prepared`, because another run has begun in its folder since then.
    """
    manifest = read_manifest(out)
    if prepared is not None and prepared.digest != manifest.digest:
        gave = f"Another run has changed the survey in {str(out)!r} since this one began."
        rule = "runs in one folder at the same time have the same texts and settings."
        raise BadValue(gave, rule, "run this survey again, or use another folder as out=.")
    must_be_finished(out, manifest)
    folded, spelling = _fold(out, manifest)
    moments = _Moments(folded.layers)
    sizes = [len(layer.counts) for layer in folded.layers]
    chances = torch.stack([layer.chances for layer in folded.layers])
    chances = chances.repeat_interleave(torch.tensor(sizes), 0)
    looks = np.concatenate([layer.looks[0].numpy() for layer in folded.layers])
    of_texts = (moments.add(text) for text in sums_of_texts(out, manifest))
    shares = mixes.shares_of(of_texts, looks, chances.numpy())
    heads = [(layer, head) for layer, size in enumerate(sizes) for head in range(size)]
    p = mixes.p_of_behaviours(shares)
    write = partial(write_table, out, manifest.digest)
    write("metrics", [_columns("metrics", manifest.metrics)])
    write("texts", _texts(out, manifest), TEXTS)
    write("tokens", _tokens(folded, spelling))
    write("examples", _examples(folded, manifest, spelling))
    write("histograms", _histograms(folded, manifest))
    write("heads", _heads(manifest, folded, moments))
    write("reasons", _reasons(folded, moments))
    write("mixes", [mixes.columns_of(heads, shares, p)])
    write("roles", [_columns("roles", mixes.roles_rows(heads, mixes.tests_of(shares, p)))])
    metrics = "".join(f"- `{row['metric']}`: {row['formula']}\n" for row in manifest.metrics)
    about = f"# A survey of {manifest.fixed['model']}\n\n{DESCRIPTION}{metrics}"
    atomic_io.replace(out / "README.md", about.encode())
    return out


class OfText(NamedTuple):
    """The sums of one text in each layer, (H, M), its numbers of queries, (M,), and the kinds of
    keys at which they look, (H, *looks.SHAPE)."""

    text: int
    sums: list[Tensor]
    queries: list[Tensor]
    looks: list[Tensor]


def sums_of_texts(out: Path, manifest: Manifest) -> Iterator[OfText]:
    """Yield the sums of each text, also of one that continues in later shards."""
    last: OfText | None = None
    for entry in manifest.shards:
        path = out / state.FOLDER / entry.state
        for text, layers in state.read_sums(path, manifest.origin(entry)):
            parts = [list(part) for part in zip(*layers, strict=True)]
            if last is not None and last.text == text:
                pairs = zip(last[1:], parts, strict=True)
                parts = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
            elif last is not None:
                yield last
            last = OfText(text, *parts)
    if last is not None:
        yield last


def totals(out: Path, manifest: Manifest, entry: ShardEntry) -> State:
    """Return the totals of a shard."""
    path = out / state.FOLDER / entry.state
    return state.read_totals(path, manifest.origin(entry), manifest.fixed["seed"])


def _fold(out: Path, manifest: Manifest) -> tuple[State, dict[int, str]]:
    """Return the totals of all shards as one; and the text of each token."""
    spelling: dict[int, str] = {}
    folded: State | None = None
    for entry in manifest.shards:
        spelling |= read_shard(out / corpus.FOLDER / entry.corpus).spelling
        shard = totals(out, manifest, entry)
        if folded is None:
            folded = shard
            examples = Pile(largest, shard.examples)
            linked, tokens = Pile(merged, shard.linked), Pile(merged, shard.tokens)
            continue
        must_have_layers(*([[x.module, *x.parts] for x in y.layers] for y in (folded, shard)))
        for known, new in zip(folded.layers, shard.layers, strict=True):
            for name in (*state.TOTAL_OF_TEXTS, *state.OF_SHARD):
                getattr(known, name).add_(getattr(new, name))
            near = new.sample["hash"] <= last_hashes(known.sample).max(initial=-1)
            if near.any():
                known.sample = sampled(np.concatenate([known.sample, new.sample[near]]))
        examples.add(shard.examples)
        linked.add(shard.linked)
        tokens.add(shard.tokens)
    assert folded is not None
    parts = examples.result(), linked.result(), tokens.result()
    return State(folded.texts, folded.layers, *parts), spelling


def must_have_layers(known: list[list[Any]], new: list[list[Any]]) -> None:
    """Raise `BadValue` if the model made other calls, or its heads read other components."""
    if known != new:
        differ = [x for x in (*known, *new) if x not in known or x not in new][:2]
        gave = f"The model made {len(known)} and {len(new)} calls or parts, such as {differ}."
        rule = "a model makes the same attention calls for every context, of the same parts."
        hint = "survey a model, or a part of it, whose layers do not depend on the text."
        raise BadValue(gave, rule, hint)


def _columns(name: str, rows: list[dict[str, Any]]) -> Columns:
    return {column: [row[column] for row in rows] for column in SCHEMA[name]}


def _texts(out: Path, manifest: Manifest) -> Iterator[Columns]:
    """Yield the texts of each shard; the name of a text is where it begins."""
    for entry in manifest.shards:
        shard = read_shard(out / corpus.FOLDER / entry.corpus)
        texts, at, contexts = np.unique(shard.texts, return_inverse=True, return_counts=True)
        tokens = np.bincount(at, shard.lengths)
        names = [shard.names.get(text) for text in texts.tolist()]
        yield {"text": texts, "name": names, "contexts": contexts, "tokens": tokens}


def _tokens(folded: State, spelling: dict[int, str]) -> Iterator[Columns]:
    """Yield the tokens of each layer: of each head and side, the highest lifts and counts."""
    known, corpus_counts = folded.tokens["token"], folded.tokens["count"]
    every = int(corpus_counts.sum())
    linked = folded.linked
    starts = np.flatnonzero(first_of_groups(linked, ("layer", "head", "side")))
    for start, end in pairwise([*starts, len(linked)]):
        group = linked[start:end]
        total = int(group["count"].sum())
        # A key may be a token that is never a query with a choice: the first of a context.
        at = np.searchsorted(known, group["token"]).clip(max=len(known) - 1)
        in_corpus = np.where(known[at] == group["token"], corpus_counts[at], 0)
        with np.errstate(divide="ignore"):
            lift = (group["count"] / total) / (in_corpus / every)
        lift = np.where(in_corpus > 0, lift, np.nan)
        frequent = np.where(group["count"] >= LEAST_COUNT, lift, -1.0)
        best = np.argsort(-np.nan_to_num(frequent, nan=-1.0), kind="stable")[:MOST_TOKENS]
        most = np.argsort(-group["count"], kind="stable")[:MOST_TOKENS]
        chosen = np.unique(np.concatenate([best, most]))
        own = group[chosen]
        yield {
            "layer": own["layer"], "head": own["head"], "token": own["token"],
            "side": ["query" if own["side"][0] == QUERY else "key"] * len(own),
            "spelling": [spelling[i] for i in own["token"].tolist()], "count": own["count"],
            "total": np.full(len(own), total), "corpus": in_corpus[chosen], "lift": lift[chosen],
        }  # fmt: skip


def _examples(folded: State, manifest: Manifest, spelling: dict[int, str]) -> Iterator[Columns]:
    names = [metric["metric"] for metric in manifest.metrics]
    metrics = [number for number, metric in enumerate(manifest.metrics) if metric["examples"]]
    for layer, of_layer in enumerate(folded.layers):
        x, rank = rows_of_layer(layer, of_layer.sample, folded.examples, metrics)
        if len(x):
            columns: dict[str, Any] = {
                name: x[name] for name in SCHEMA["examples"] if name in (x.dtype.names or ())
            }
            columns["metric"] = [names[number] for number in x["metric"].tolist()]
            columns["rank"] = rank
            columns["token"] = [spelling[i] for i in x["token"].tolist()]
            columns["token_class"] = [CLASS_NAMES[i] for i in x["token_class"].tolist()]
            yield columns


def _histograms(folded: State, manifest: Manifest) -> Iterator[Columns]:
    # What the columns of `counts` are: the histograms of all metrics, one after the other.
    every = [
        (metric["metric"], bin, *ends)
        for metric in manifest.metrics
        for bin, ends in enumerate(pairwise(bins_of(metric).edges()))
    ]
    columns = [np.array(x) for x in zip(*every, strict=True)]
    for layer, counts in enumerate(x.counts.numpy() for x in folded.layers):
        head, at = counts.nonzero()
        if len(head):
            own = [np.full(len(head), layer), head, *(x[at] for x in columns), counts[head, at]]
            yield dict(zip(SCHEMA["histograms"], own, strict=True))


def bins_of(metric: dict[str, Any]) -> Bins:
    """Return the bins of a metric, from its row in the manifest."""
    ends, bounds = (metric["low"], metric["high"]), (metric["least"], metric["most"])
    return Bins(*ends, metric["bins"], metric["logarithmic"], bounds)


def _heads(manifest: Manifest, folded: State, moments: "_Moments") -> Iterator[Columns]:
    every = [bins_of(metric) for metric in manifest.metrics]
    slices = slices_of(every)
    for number, layer in enumerate(folded.layers):
        rows = []
        group = len(layer.counts) // layer.key_heads
        for head, counts in enumerate(layer.counts.numpy()):
            for m, (bins, own) in enumerate(zip(every, slices, strict=True)):
                if queries := int(layer.queries[0, m]):
                    row: dict[str, Any] = {"layer": number, "head": head, "key_head": head // group}
                    row |= {"module": layer.module, "metric": manifest.metrics[m]["metric"]}
                    row |= moments.numbers(number, head, m, bins) | quantiles(counts[own], bins)
                    rows.append(row | {"uniform": float(layer.uniform[m]) / queries})
        if rows:
            yield _columns("heads", rows)


def _reasons(folded: State, moments: "_Moments") -> Iterator[Columns]:
    for number, layer in enumerate(folded.layers):
        named = sorted(zip(layer.parts, itertools.count(len(layer.uniform)), strict=False))
        rows = [
            {"layer": number, "head": head, "side": side, "component": component}
            | moments.numbers(number, head, column, ANY)
            for head, sums in enumerate(layer.sums[0].tolist())
            for (side, component), column in named
            if sums[column]  # exactly 0 if the head does not read it
        ]
        if rows:
            yield _columns("reasons", rows)


class _Moments:
    """Sums over texts, for each layer.

    Attributes:
        texts: the number of texts with a query, (M,).
        apart: the sum of (mean of a text - mean), and that of its squares, (2, H, M).
        variance: the variance of the mean: the sum over texts of (mean without this text - mean)^2,
            (H, M). Texts are clusters, and their lengths differ (Bell and McCaffrey 2002, Survey
            Methodology 28: CR3).
    """

    def __init__(self, layers: list[LayerState]) -> None:
        self.sums, self.queries = [x.sums[0] for x in layers], [x.queries[0] for x in layers]
        self.means = [a / n.clamp(min=1) for a, n in zip(self.sums, self.queries, strict=True)]
        self.texts = [torch.zeros_like(x) for x in self.queries]
        self.apart = [torch.zeros(2, *x.shape, dtype=x.dtype) for x in self.sums]
        self.variance = [torch.zeros_like(x) for x in self.sums]

    def add(self, text: OfText) -> np.ndarray:
        """Add the sums of a text. Returns its looks, of all heads."""
        for layer, (sums, queries) in enumerate(zip(text.sums, text.queries, strict=True)):
            total, count, mean = self.sums[layer], self.queries[layer], self.means[layer]
            self.texts[layer] += queries > 0
            apart = (sums / queries.clamp(min=1) - mean) * (queries > 0)
            self.apart[layer] += torch.stack([apart, apart**2])
            self.variance[layer] += ((total - sums) / (count - queries) - mean) ** 2
        return torch.cat(text.looks).numpy()

    def numbers(self, layer: int, head: int, metric: int, bins: Bins) -> dict[str, Any]:
        queries, texts = int(self.queries[layer][metric]), int(self.texts[layer][metric])
        mean = float(self.sums[layer][head, metric]) / queries
        apart, squares = self.apart[layer][:, head, metric].tolist()
        low = high = sd = math.nan
        if texts > 1:
            variance = float(self.variance[layer][head, metric])
            low, high = interval(mean, variance, texts, bins.limits)
            sd = math.sqrt(max(squares - apart**2 / texts, 0.0) / (texts - 1))
        return {
            "mean": mean, "low": low, "high": high, "mean_of_texts": mean + apart / texts,
            "sd_of_texts": sd, "queries": queries, "texts": texts,
        }  # fmt: skip


def quantiles(counts: np.ndarray, bins: Bins) -> dict[str, float]:
    """Return quantiles from a histogram, interpolated in their bins, and the width of the median's.

    They are NaN for a metric that is 0 or 1, and in a bin that has values beyond it too.

    >>> quantiles(np.array([1, 1, 0, 2]), Bins(0, 4, 4))["q50"]
    2.0
    """
    if bins.count < 3:  # of yes or no
        return dict.fromkeys([*QUANTILES, "bin_width"], math.nan)
    edges, (least, most) = np.array(bins.edges()), bins.limits
    if least is None or least < bins.low:
        edges[0] = math.nan
    if most is None or most > bins.high:
        edges[-1] = math.nan
    upto = counts.cumsum()
    targets = np.array([*QUANTILES.values()]) * upto[-1]
    at = upto.searchsorted(targets)
    widths = np.diff(edges)[at]
    numbers = edges[at] + (targets - upto[at] + counts[at]) / counts[at] * widths
    width = widths[[*QUANTILES].index("q50")]
    return dict(zip([*QUANTILES, "bin_width"], [*numbers.tolist(), float(width)], strict=True))
