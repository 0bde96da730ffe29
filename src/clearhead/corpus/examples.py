"""Select examples: for each head and metric, a uniform sample of queries, and the largest values.

The sample has the `SAMPLE` queries with the smallest hashes, of those that a metric counts. It does
not depend on the order of the texts, and samples of shards merge exactly. It is the same for all
heads of a layer, so a query is stored once for all of them. Its values in order, cut into ten equal
parts, are its deciles.

The largest values of each head are stored by `BANDS` of positions, because a query with few keys
has large weights in any head. All orders are total, so the selection is unique.

An example is a reference: the query, and its `TOP_KEYS` largest weights.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..core.stats import TopWeights
from .basic import TOP_KEYS
from .groups import first_of_groups, rank_in_group
from .metric import Batch

DECILES, IN_DECILE = 10, 20
SAMPLE = DECILES * IN_DECILE
LARGEST = DECILES  # the stratum of the largest values; those of each band are LARGEST + its number
BANDS, OF_LARGEST = (0, 4, 16, 64, 256), 8  # the first query of each, and its largest values

QUERY = np.dtype(
    [
        ("hash", "i8"), ("text", "i4"), ("context", "i4"), ("query", "i4"), ("token", "i4"),
        ("token_class", "i1"),
    ]
)  # fmt: skip
OF_QUERY = list(QUERY.names or ())
EXAMPLE = np.dtype(
    [
        ("layer", "i2"), ("head", "i2"), ("metric", "i2"), ("stratum", "i1"), ("value", "f4"),
        *((name, QUERY[name]) for name in OF_QUERY),
        ("keys", "i4", TOP_KEYS), ("weights", "f4", TOP_KEYS),
    ]
)  # fmt: skip
GROUP = "stratum", "metric", "head", "layer"  # the fields of a group of examples
ORDER = "query", "context", "text", "hash"  # the last one first
_MOST = np.iinfo(np.int64).max


def sample_type(heads: int, metrics: int) -> np.dtype:
    """Return the type of a query of a layer's sample; a value is NaN if it does not count."""
    return np.dtype(
        [
            *((name, QUERY[name]) for name in OF_QUERY), ("values", "f4", (heads, metrics)),
            ("keys", "i4", (heads, TOP_KEYS)), ("weights", "f4", (heads, TOP_KEYS)),
        ]
    )  # fmt: skip


def hashes(seed: int, texts: np.ndarray, contexts: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the hash of each query, from the seed and the numbers of its text and context.

    Source: Steele et al. 2014, "Fast splittable pseudorandom number generators" (SplitMix64).
    """
    state = np.asarray([seed], dtype=np.uint64)
    for part in (texts, contexts, queries):
        state = _mixed(state ^ _mixed(part.astype(np.uint64)))
    return (state >> np.uint64(1)).astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sampled(sample: np.ndarray) -> np.ndarray:
    """Select the queries that are among the first `SAMPLE` of a metric, in the order of hashes."""
    sample = sample[np.lexsort([sample[name] for name in ORDER])]
    counts = ~np.isnan(sample["values"][:, 0])
    return sample[(counts & (counts.cumsum(0) <= SAMPLE)).any(1)]


def largest(examples: np.ndarray) -> np.ndarray:
    """Select the largest values of each group, in their order."""
    order = [*(examples[name] for name in ORDER), -examples["value"]]
    examples = examples[np.lexsort([*order, *(examples[name] for name in GROUP)])]
    return examples[rank_in_group(first_of_groups(examples, GROUP)) < OF_LARGEST]


def rows_of_layer(
    layer: int, sample: np.ndarray, of_largest: np.ndarray, metrics: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples of a layer for its table, and the rank of each in its stratum.

    A decile is in the order of hashes. The largest values are those of all bands in turn.
    """
    parts = [of_largest[of_largest["layer"] == layer]]
    in_band = rank_in_group(first_of_groups(parts[0], GROUP))
    places = [np.lexsort([-parts[0]["value"], in_band]).argsort()]
    for column, metric in enumerate(metrics):
        own = sample[~np.isnan(sample["values"][:, 0, column])][:SAMPLE]
        values = own["values"][..., column]
        part = np.zeros(values.shape, EXAMPLE)
        part["layer"], part["metric"], part["head"] = layer, metric, np.arange(values.shape[1])
        part["value"], part["keys"], part["weights"] = values, own["keys"], own["weights"]
        order = values.argsort(0, kind="stable").argsort(0)
        part["stratum"] = order * DECILES // max(len(own), 1)
        for name in OF_QUERY:
            part[name] = own[name][:, None]
        parts.append(part.ravel())
        places.append(np.repeat(np.arange(len(own)), values.shape[1]))
    rows = np.concatenate(parts)
    rows["stratum"] = rows["stratum"].clip(max=LARGEST)
    rows = rows[np.lexsort([np.concatenate(places), *(rows[name] for name in GROUP)])]
    return rows, rank_in_group(first_of_groups(rows, GROUP))


class Queries:
    """The queries of a batch, in the order by which samples are selected.

    Attributes:
        records: the query, (B, T) of `QUERY`.
        order: the numbers of all queries, b T + t, from the smallest hash on.
    """

    def __init__(self, seed: int, batch: Batch, classes: Tensor) -> None:
        texts, contexts = (np.asarray(x)[:, None] for x in (batch.texts, batch.contexts))
        at = np.arange(batch.ids.shape[1])
        self.records = np.zeros(tuple(batch.ids.shape), QUERY)
        columns = hashes(seed, texts, contexts, at), texts, contexts, at, batch.ids, classes
        for name, column in zip(OF_QUERY, columns, strict=True):
            self.records[name] = column
        self.hash = torch.from_numpy(self.records["hash"].copy())
        self.order = self.hash.flatten().argsort(stable=True)


class LayerExamples:
    """The examples of one layer, of some metrics, collected batch by batch."""

    def __init__(self, layer: int, heads: int, metrics: Sequence[int]) -> None:
        self.layer, self.metrics = layer, list(metrics)
        self.sample = np.zeros(0, sample_type(heads, len(metrics)))
        self.largest: np.ndarray = np.zeros(0, EXAMPLE)
        self._largest: list[np.ndarray] = []
        # A query is a candidate if it precedes the last example that is stored.
        self._hash = np.full(len(metrics), _MOST)
        shape = len(metrics), heads, len(BANDS)
        self._value = np.full(shape, -np.inf, np.float32)
        self._value_hash = np.full(shape, _MOST)

    def begin(self, counts: Sequence[Tensor], queries: Queries, top: TopWeights) -> None:
        """Begin a batch: choose its queries by the counts of each metric, (B, T)."""
        self.queries, self.top = queries, top
        chosen = torch.zeros(queries.order.shape, dtype=torch.bool)
        for of_metric, last in zip(counts, self._hash.tolist(), strict=True):
            own = queries.order[of_metric.flatten()[queries.order]][:SAMPLE]
            chosen[own[queries.hash.flatten()[own] <= last]] = True
        self._at = chosen.view_as(queries.hash).nonzero(as_tuple=True)
        self._new: np.ndarray = np.zeros(len(self._at[0]), self.sample.dtype)
        self._fill(self._new, self._at[0], slice(None), self._at[1])

    def _fill(self, rows: np.ndarray, b: Tensor, h: "Tensor | slice", t: Tensor) -> None:
        of_query = self.queries.records[b.numpy(), t.numpy()]
        for name in OF_QUERY:
            rows[name] = of_query[name]
        n = self.top.keys.shape[-1]
        rows["keys"] = -1  # a context may have fewer keys
        rows["keys"][..., :n] = self.top.keys[b, h, t]
        rows["weights"][..., :n] = self.top.weights[b, h, t]

    def add(self, numbers: slice, values: Tensor, counts: Tensor) -> None:
        """Add the values of metrics, (M, B, H, T), where they count, (M, B, T)."""
        columns = [n for n, it in enumerate(self.metrics) if numbers.start <= it < numbers.stop]
        own = [self.metrics[n] - numbers.start for n in columns]
        values = values[own].masked_fill(~counts[own].unsqueeze(2), -torch.inf)
        b, t = self._at
        chosen = values[:, b, :, t].movedim(1, -1)
        self._new["values"][..., columns] = chosen.masked_fill(chosen == -torch.inf, torch.nan)
        metrics, T = np.array(self.metrics)[columns], values.shape[-1]
        for band, (first, end) in enumerate(pairwise([*BANDS, T])):
            if not columns or first >= T:
                break
            part, hash = values[..., first:end], self.queries.hash[:, None, first:end]
            bounds = (x[columns, :, band] for x in (self._value, self._value_hash))
            least, tied = (torch.from_numpy(x)[:, None, :, None] for x in bounds)
            # A context has at most `OF_LARGEST` of the largest values, without ties.
            of_context = part.topk(min(OF_LARGEST, part.shape[-1])).values[..., -1:]
            precedes = (part > least) | ((part == least) & (hash <= tied))
            is_candidate = (part > -torch.inf) & (part >= of_context) & precedes
            m, b, h, t = is_candidate.nonzero(as_tuple=True)
            new = np.zeros(len(b), EXAMPLE)
            new["layer"], new["metric"], new["head"] = self.layer, metrics[m], h
            new["stratum"], new["value"] = LARGEST + band, part[m, b, h, t]
            self._fill(new, b, h, t + first)
            self._largest.append(new)

    def select(self) -> None:
        """Select among the candidates of a batch."""
        if len(self._new):
            self.sample = sampled(np.concatenate([self.sample, self._new]))
            self._hash = last_hashes(self.sample)
        if any(map(len, self._largest)):
            x = self.largest = largest(np.concatenate([self.largest, *self._largest]))
            full = rank_in_group(first_of_groups(x, GROUP)) == OF_LARGEST - 1
            last: np.ndarray = x[full]
            column = np.searchsorted(self.metrics, last["metric"])
            at = column, last["head"], last["stratum"] - LARGEST
            self._value[at], self._value_hash[at] = last["value"], last["hash"]
        self._largest.clear()


def last_hashes(sample: np.ndarray) -> np.ndarray:
    """Return the hash of the last query of each metric, (M,), beyond which none is sampled."""
    own = [sample["hash"][counts] for counts in ~np.isnan(sample["values"][:, 0]).T]
    return np.array([x[SAMPLE - 1] if len(x) >= SAMPLE else _MOST for x in own], dtype=np.int64)
