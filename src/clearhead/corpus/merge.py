"""Write the tables of a survey from what the states of its shards are folded into (`fold`)."""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import BadValue
from ..core.files import atomic_io
from ..core.formatting import quantity
from . import mixes
from .examples import rows_of_layer
from .fold import Fold, Moments, looks_of
from .groups import first_of_groups
from .looks import NAMES as CLASS_NAMES
from .manifest import Manifest, ShardEntry, read_manifest
from .metric import Bins, slices_of
from .state import FOLDER, State, file_of, is_state_of
from .tables import DESCRIPTION, QUANTILES, SCHEMA, Columns, digest_of_tables, write_table
from .token_counts import QUERY

# A text may continue in later shards.
TEXTS = (
    "select text, any_value(name) as name, sum(contexts)::int as contexts, "
    "sum(tokens)::bigint as tokens from rows group by text order by text"
)
MOST_TOKENS = 100  # rows of a head and side in the table of tokens, by lift and by count
ANY = Bins(bounds=(None, None))  # of numbers without limits
LEAST_COUNT = 5  # links of a token with a lift


def missing_shards(out: Path, manifest: Manifest) -> list[ShardEntry]:
    """Return the shards without a complete state."""
    return [x for x in manifest.shards if not is_state_of(*file_of(out, manifest, x))]


def must_be_finished(out: Path, manifest: Manifest) -> None:
    """Raise `BadValue` if a shard has no complete state of its own."""
    if missing := missing_shards(out, manifest):
        path = str(out / FOLDER / missing[0].state)
        lacks = f"{len(missing)} of {quantity(len(manifest.shards), 'shard')}"
        gave = f"{str(out)!r} lacks {lacks}: {path!r} is missing, incomplete or of another shard."
        rule = "a survey can be opened when all shards are finished and merged."
        raise BadValue(gave, rule, "run the same survey again, which computes them, and merges.")


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
    fold = Fold(out, manifest)
    fold.share()
    folded = fold.total
    moments, spelling = Moments(folded.layers), dict[int, str]()
    known, apart = moments.tensors(), list[np.ndarray]()
    for tensors, of_texts in fold.texts():
        for name, sums in known.items():
            sums += tensors[name]
        own = [tensors[f"mixes.{i}"].numpy() for i in range(3)]
        apart = [a + b for a, b in zip(apart, own, strict=True)] if apart else own
        spelling |= {int(i): text for i, text in of_texts["spelling"].items()}
    sizes = [len(layer.counts) for layer in folded.layers]
    chances = torch.stack([layer.chances for layer in folded.layers])
    chances = chances.repeat_interleave(torch.tensor(sizes), 0)
    shares = mixes.shares_of(apart, looks_of(folded), chances.numpy())
    heads = [(layer, head) for layer, size in enumerate(sizes) for head in range(size)]
    p = mixes.p_of_behaviours(shares)
    write = partial(write_table, out, manifest.digest)
    write("metrics", [_columns("metrics", manifest.metrics)])
    write("texts", _texts(fold), TEXTS)
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


def _columns(name: str, rows: list[dict[str, Any]]) -> Columns:
    return {column: [row[column] for row in rows] for column in SCHEMA[name]}


def _texts(fold: Fold) -> Iterator[Columns]:
    """Yield the texts of each group of shards; the name of a text is where it begins."""
    for _, about in fold.texts():
        columns = map(list, zip(*about["texts"], strict=True))
        yield dict(zip(SCHEMA["texts"], columns, strict=True))


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


def _heads(manifest: Manifest, folded: State, moments: Moments) -> Iterator[Columns]:
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


def _reasons(folded: State, moments: Moments) -> Iterator[Columns]:
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
