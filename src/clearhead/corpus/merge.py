"""Fold the states of all shards into the tables, in the order of the shards.

The result does not depend on the order in which workers finished. The memory does not grow with the
corpus: sums of texts are read shard by shard, twice, for means and for deviations from them.
"""

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
from ..core.formatting import quantity
from . import corpus, mixes, state
from .corpus import read_shard
from .examples import GROUP, selected
from .groups import first_of_groups, rank_in_group
from .intervals import interval
from .manifest import Manifest, read_manifest
from .metric import Bins
from .state import State, is_state_of, read_state
from .tables import SCHEMA, Columns, write_table
from .token_counts import QUERY, merged

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
MOST_TOKENS = 100  # rows of a head and side in the table of tokens, by lift and by count
LEAST_COUNT = 5  # links of a token with a lift


def missing_shards(out: Path, manifest: Manifest) -> list[int]:
    """Return the numbers of the shards without a complete state."""
    return [
        number
        for number, entry in enumerate(manifest.shards)
        if not is_state_of(out / state.FOLDER / entry.state, manifest.origin(entry))
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


def merge(out: Path, prepared: Manifest | None = None) -> Path:
    """Write the tables of a survey.

    Raises `BadValue` if a shard is not finished, and if the survey is not the one that was
    `prepared`, because another run has begun in its folder since then.
    """
    manifest = read_manifest(out)
    if prepared is not None and prepared.digest != manifest.digest:
        raise BadValue(
            f"Another run has changed the survey in {str(out)!r} since this one began.",
            "runs in one folder at the same time have the same texts and settings.",
            "run this survey again, or use another folder as out=.",
        )
    must_be_finished(out, manifest)
    folded, spelling = _fold(out, manifest)
    write = partial(write_table, out, manifest.digest)
    write("metrics", [_columns("metrics", manifest.metrics)])
    write("texts", _texts(out, manifest))
    write("tokens", _tokens(folded, spelling))
    write("examples", _examples(folded, manifest))
    write("histograms", _histograms(folded, manifest))
    write("heads", _heads(out, manifest, folded))
    _write_roles(out, manifest, folded)
    return out


def states(out: Path, manifest: Manifest) -> Iterator[State]:
    """Yield the states of all shards, in their order."""
    for entry in manifest.shards:
        path = out / state.FOLDER / entry.state
        yield read_state(path, manifest.origin(entry), manifest.fixed["seed"])


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
    for shard in states(out, manifest):
        for row, text in enumerate(shard.texts.tolist()):
            parts = [
                [getattr(layer, name)[row] for layer in shard.layers] for name in OfText._fields[1:]
            ]
            if last is not None and last.text == text:
                pairs = zip(last[1:], parts, strict=True)
                parts = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
            elif last is not None:
                yield last
            last = OfText(text, *parts)
    if last is not None:
        yield last


def _fold(out: Path, manifest: Manifest) -> tuple[State, dict[int, str]]:
    """Return the states of all shards as one, without sums of texts; and the text of each token."""
    spelling: dict[int, str] = {}
    folded: State | None = None
    for entry, shard in zip(manifest.shards, states(out, manifest), strict=True):
        spelling |= read_shard(out / corpus.FOLDER / entry.corpus).spelling
        if folded is None:
            folded = shard
            continue
        _must_have_layers(*([layer.module for layer in x.layers] for x in (folded, shard)))
        for known, new in zip(folded.layers, shard.layers, strict=True):
            known.uniform += new.uniform
            known.counts += new.counts
            known.chances += new.chances
        folded.examples = selected(np.concatenate([folded.examples, shard.examples]))
        folded.linked = merged(np.concatenate([folded.linked, shard.linked]))
        folded.tokens = merged(np.concatenate([folded.tokens, shard.tokens]))
    assert folded is not None
    return folded, spelling


def _must_have_layers(known: list[str], modules: list[str]) -> None:
    if known != modules:
        raise BadValue(
            f"Two shards have different layers: {len(known)} and {len(modules)}.",
            "a model makes the same attention calls for every context.",
            "survey a model, or a part of it, whose layers do not depend on the text.",
        )


def _columns(name: str, rows: list[dict[str, Any]]) -> Columns:
    return {column: [row[column] for row in rows] for column in SCHEMA[name]}


def _texts(out: Path, manifest: Manifest) -> Iterator[Columns]:
    rows: dict[int, dict[str, Any]] = {}
    for entry in manifest.shards:
        shard = read_shard(out / corpus.FOLDER / entry.corpus)
        for text, length in zip(shard.texts.tolist(), shard.lengths.tolist(), strict=True):
            if text not in rows:
                new = {"text": text, "name": shard.names[text], "contexts": 0, "tokens": 0}
                rows[text] = new
            rows[text]["contexts"] += 1
            rows[text]["tokens"] += length
        last = max(rows)
        if done := [row for text, row in rows.items() if text < last]:
            yield _columns("texts", done)
        rows = {last: rows[last]}
    yield _columns("texts", list(rows.values()))


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
        n = len(chosen)
        yield {
            "layer": group["layer"][chosen],
            "head": group["head"][chosen],
            "side": ["query" if group["side"][0] == QUERY else "key"] * n,
            "token": group["token"][chosen],
            "spelling": [spelling[i] for i in group["token"][chosen].tolist()],
            "count": group["count"][chosen],
            "total": np.full(n, total),
            "corpus": in_corpus[chosen],
            "lift": lift[chosen],
        }


def _examples(folded: State, manifest: Manifest) -> Iterator[Columns]:
    x = folded.examples
    if not len(x):
        return
    names = [metric["metric"] for metric in manifest.metrics]
    columns: dict[str, Any] = {
        name: x[name] for name in SCHEMA["examples"] if name in (x.dtype.names or ())
    }
    columns["metric"] = [names[number] for number in x["metric"].tolist()]
    columns["rank"] = rank_in_group(first_of_groups(x, GROUP)).astype(np.int8)
    yield columns


def _histograms(folded: State, manifest: Manifest) -> Iterator[Columns]:
    every = [bins_of(metric) for metric in manifest.metrics]
    names = [metric["metric"] for metric in manifest.metrics]
    # What the columns of `counts` are: the histograms of all metrics, one after the other.
    metric = np.repeat(np.arange(len(every)), [bins.count for bins in every])
    bin = np.concatenate([np.arange(bins.count) for bins in every])
    low = np.concatenate([bins.edges()[:-1] for bins in every])
    high = np.concatenate([bins.edges()[1:] for bins in every])
    for layer, counts in enumerate(x.counts for x in folded.layers):
        head, column = (x.numpy() for x in counts.nonzero(as_tuple=True))
        if len(head):
            yield {
                "layer": np.full(len(head), layer),
                "head": head,
                "metric": [names[number] for number in metric[column].tolist()],
                "bin": bin[column],
                "low": low[column],
                "high": high[column],
                "count": counts.numpy()[head, column],
            }


def bins_of(metric: dict[str, Any]) -> Bins:
    """Return the bins of a metric, from its row in the manifest."""
    ends, bounds = (metric["low"], metric["high"]), (metric["least"], metric["most"])
    return Bins(*ends, metric["bins"], metric["logarithmic"], bounds)


def _heads(out: Path, manifest: Manifest, folded: State) -> Iterator[Columns]:
    moments = _moments(out, manifest)
    for layer, (folded_layer, of_layer) in enumerate(zip(folded.layers, moments, strict=True)):
        rows = []
        H = len(folded_layer.counts)
        for head in range(H):
            key_head = head // (H // folded_layer.key_heads)
            start = 0
            for number, metric in enumerate(manifest.metrics):
                bins = bins_of(metric)
                counts = folded_layer.counts[head, start : start + bins.count]
                start += bins.count
                queries = int(of_layer.queries[number])
                if not queries:
                    continue
                row: dict[str, Any] = {"layer": layer, "head": head, "key_head": key_head}
                row |= {"module": folded_layer.module, "metric": metric["metric"]}
                row |= of_layer.numbers(head, number, bins) | quantiles(counts, bins)
                row["uniform"] = float(folded_layer.uniform[number]) / queries
                rows.append(row)
        if rows:
            yield _columns("heads", rows)


def _write_roles(out: Path, manifest: Manifest, folded: State) -> None:
    """Write the tables `mixes` and `roles`."""
    sizes = [len(layer.counts) for layer in folded.layers]
    heads = [(layer, head) for layer, size in enumerate(sizes) for head in range(size)]

    def looks() -> Iterator[np.ndarray]:
        return (torch.cat(text.looks).numpy() for text in sums_of_texts(out, manifest))

    chances = torch.stack([layer.chances for layer in folded.layers])
    chances = chances.repeat_interleave(torch.tensor(sizes), 0)
    shares = mixes.shares_of(looks, chances.numpy())
    p = mixes.p_of_behaviours(shares)
    tests = mixes.tests_of(shares, p)
    write_table(out, manifest.digest, "mixes", [_columns("mixes", mixes.rows_of(heads, shares, p))])
    write_table(out, manifest.digest, "roles", [_columns("roles", mixes.roles_rows(heads, tests))])


class _Moments(NamedTuple):
    """The sums of one layer over texts, (H, M); the numbers of queries and of texts, (M,)."""

    sums: Tensor
    queries: Tensor
    texts: Tensor
    means: Tensor  # the sum of the means of texts
    # The variance of the mean: the sum over texts of (mean without this text - mean)^2. Texts are
    # clusters, and their lengths differ (Bell and McCaffrey 2002, Survey Methodology 28: CR3).
    variance: Tensor
    mean_squares: Tensor  # the sum of (mean of a text - mean of these)^2

    def numbers(self, head: int, metric: int, bins: Bins) -> dict[str, Any]:
        queries, texts = int(self.queries[metric]), int(self.texts[metric])
        mean = float(self.sums[head, metric]) / queries
        low = high = sd = math.nan
        if texts > 1:
            variance = float(self.variance[head, metric])
            low, high = interval(mean, variance, texts, bins.limits)
            sd = math.sqrt(float(self.mean_squares[head, metric]) / (texts - 1))
        return {
            "mean": mean, "low": low, "high": high,
            "mean_of_texts": float(self.means[head, metric]) / texts, "sd_of_texts": sd,
            "queries": queries, "texts": texts,
        }  # fmt: skip


def _moments(out: Path, manifest: Manifest) -> list[_Moments]:
    first: list[list[Tensor]] = []
    for text in sums_of_texts(out, manifest):
        for layer, (sums, queries) in enumerate(zip(text.sums, text.queries, strict=True)):
            if layer == len(first):
                first.append([torch.zeros_like(x) for x in (sums, queries, queries, sums)])
            total, count, texts, means = first[layer]
            total += sums
            count += queries
            texts += queries > 0
            means += sums / queries.clamp(min=1)
    second = [[torch.zeros_like(layer[0]) for _ in range(2)] for layer in first]
    for text in sums_of_texts(out, manifest):
        for layer, (sums, queries) in enumerate(zip(text.sums, text.queries, strict=True)):
            total, count, texts, means = first[layer]
            mean = total / count.clamp(min=1)
            second[layer][0] += ((total - sums) / (count - queries) - mean) ** 2
            of_text = sums / queries.clamp(min=1)
            second[layer][1] += ((of_text - means / texts.clamp(min=1)) ** 2) * (queries > 0)
    return [_Moments(*one, *two) for one, two in zip(first, second, strict=True)]


def quantiles(counts: Tensor, bins: Bins) -> dict[str, float]:
    """Return quantiles from a histogram, interpolated in their bins, and the width of the median's.

    They are NaN for a metric that is 0 or 1, and in a bin that has values beyond it too.

    >>> quantiles(torch.tensor([1, 1, 0, 2]), Bins(0, 4, 4))["q50"]
    2.0
    """
    if bins.count < 3:  # of yes or no
        return {**dict.fromkeys(QUANTILES, math.nan), "bin_width": math.nan}
    edges, cumulative = bins.edges(), counts.cumsum(0).tolist()
    least, most = bins.limits
    is_open = {
        0: least is None or least < bins.low,
        bins.count - 1: most is None or most > bins.high,
    }
    result: dict[str, float] = {}
    for name, fraction in QUANTILES.items():
        target = fraction * cumulative[-1]
        index = next(i for i, total in enumerate(cumulative) if total >= target and counts[i])
        before = cumulative[index] - int(counts[index])
        within = (target - before) / int(counts[index])
        low, high = math.nan if is_open.get(index) else edges[index], edges[index + 1]
        result[name] = low + within * (high - low)
        if name == "q50":
            result["bin_width"] = high - low
    return result
