"""Select examples: for each head and metric, some queries of every range of values.

The range of values is cut into `STRATA`. From each, the queries with the smallest hashes are
stored: a uniform sample that does not depend on the order of the texts, and needs no first pass.
The queries with the largest values are stored too. All orders are total, so the selection is
unique.

An example is a reference: the query, and its `TOP_KEYS` largest weights.
"""

import numpy as np
import torch
from torch import Tensor

from ..core.stats import TopWeights
from .basic import TOP_KEYS
from .groups import first_of_groups, rank_in_group
from .metric import Batch, Metric

STRATA, LARGEST = 20, 20  # the last stratum, number 20, has the largest values
IN_STRATUM, OF_LARGEST = 3, 8

EXAMPLE = np.dtype(
    [
        ("layer", "i2"), ("head", "i2"), ("metric", "i2"), ("stratum", "i1"), ("hash", "i8"),
        ("value", "f4"), ("text", "i4"), ("context", "i4"), ("query", "i4"),
        ("keys", "i4", TOP_KEYS), ("weights", "f4", TOP_KEYS),
    ]
)  # fmt: skip
GROUP = "stratum", "metric", "head", "layer"  # the fields of a group of examples
_MOST = np.iinfo(np.int64).max


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


def selected(examples: np.ndarray) -> np.ndarray:
    """Select the examples to store, from any number of them, in the order of the tables."""
    largest = examples["stratum"] == LARGEST
    value = np.where(largest, -examples["value"], 0)
    names = "query", "context", "text", "hash"
    order = np.lexsort([*(examples[x] for x in names), value, *(examples[x] for x in GROUP)])
    examples = examples[order]
    rank = rank_in_group(first_of_groups(examples, GROUP))
    return examples[rank < np.where(examples["stratum"] == LARGEST, OF_LARGEST, IN_STRATUM)]


class HashOrder:
    """The order of the queries of a batch by which samples are selected.

    Attributes:
        hash: the hash of each query, (B, T).
        queries: the numbers of all queries, b T + t, from the smallest hash on.
        rank: the place of each query in `queries`, (B, T).
    """

    def __init__(self, seed: int, batch: Batch) -> None:
        texts, contexts = (np.asarray(x)[:, None] for x in (batch.texts, batch.contexts))
        self.hash = torch.from_numpy(hashes(seed, texts, contexts, np.arange(batch.ids.shape[1])))
        self.queries = self.hash.flatten().argsort(stable=True)
        self.rank = self.queries.argsort().view_as(self.hash)


class LayerExamples:
    """The examples of one layer, collected batch by batch."""

    def __init__(self, layer: int, heads: int, metrics: list[Metric]) -> None:
        self.layer, self.heads, self.metrics = layer, heads, metrics
        self.examples = np.zeros(0, EXAMPLE)
        self._new: list[np.ndarray] = []
        shape = len(metrics), heads
        # A query is a candidate if it precedes the last example that is stored.
        self._hash = torch.full((*shape, STRATA), _MOST)  # the last of each stratum
        self._value = torch.full(shape, -torch.inf)  # of the largest values, and its hash
        self._value_hash = torch.full(shape, _MOST)

    def add(
        self,
        metric: int,
        values: Tensor,
        bins: Tensor,
        counts: Tensor,
        batch: Batch,
        order: HashOrder,
        top: TopWeights,
    ) -> None:
        """Add the candidates of a batch: values and their bins, (B, H, T), counts, (B, T).

        Rows are built for the candidates alone, and of these for few of each batch.
        """
        (B, T), counts = counts.shape, counts.unsqueeze(1)
        strata = bins * STRATA // self.metrics[metric].bins.count
        hash = order.hash.unsqueeze(1)
        limit = self._hash[metric].expand(B, -1, -1).gather(2, strata)
        b, h, t = (counts & (hash < limit)).nonzero(as_tuple=True)
        group, rank = _first(h * STRATA + strata[b, h, t], order.rank[b, t], B * T)
        sample = order.queries[rank]
        value, tied = (x[metric].unsqueeze(-1) for x in (self._value, self._value_hash))
        # A context has at most `OF_LARGEST` of the largest values, without ties.
        least = values.masked_fill(~counts, -torch.inf).topk(min(OF_LARGEST, T)).values[..., -1:]
        precedes = (values > value) | ((values == value) & (hash < tied))
        b, h, t = (counts & (values >= least) & precedes).nonzero(as_tuple=True)
        if not len(sample) + len(b):
            return
        stratum = torch.cat([group % STRATA, torch.full_like(b, LARGEST)])
        b, h, t = (
            torch.cat(pair) for pair in ((sample // T, b), (group // STRATA, h), (sample % T, t))
        )
        new = np.zeros(len(b), EXAMPLE)
        new["layer"], new["metric"], new["head"] = self.layer, metric, h
        new["stratum"], new["hash"] = stratum, order.hash[b, t]
        new["value"], new["query"] = values[b, h, t], t
        new["text"] = np.asarray(batch.texts)[b.numpy()]
        new["context"] = np.asarray(batch.contexts)[b.numpy()]
        new["keys"] = -1  # a context may have fewer keys
        new["keys"][:, : top.keys.shape[-1]] = top.keys[b, h, t]
        new["weights"][:, : top.keys.shape[-1]] = top.weights[b, h, t]
        self._new.append(new)

    def select(self) -> None:
        """Select among the candidates of a batch."""
        if not self._new:
            return
        self.examples = x = selected(np.concatenate([self.examples, *self._new]))
        self._new.clear()
        sample, largest = x[x["stratum"] < LARGEST], x[x["stratum"] == LARGEST]
        _last(self._hash, sample, "hash", ("metric", "head", "stratum"), IN_STRATUM)
        for limits, name in ((self._value, "value"), (self._value_hash, "hash")):
            _last(limits, largest, name, ("metric", "head"), OF_LARGEST)


def _first(groups: Tensor, ranks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `IN_STRATUM` queries of each group as groups and ranks, which are below
    `count`."""
    pairs = np.sort((groups * count + ranks).numpy())
    group = pairs // count
    first = np.ones(len(pairs), dtype=bool)
    first[IN_STRATUM:] = group[IN_STRATUM:] != group[:-IN_STRATUM]
    return torch.from_numpy(group[first]), torch.from_numpy(pairs[first] % count)


def _last(limits: Tensor, x: np.ndarray, name: str, groups: tuple[str, ...], size: int) -> None:
    """Store the field `name` of the last example of each full group in `limits`."""
    index = np.ravel_multi_index([x[group] for group in groups], tuple(limits.shape))
    known, first, count = np.unique(index, return_index=True, return_counts=True)
    full = count == size
    last = x[name][first[full] + size - 1]
    limits.view(-1)[torch.from_numpy(known[full])] = torch.from_numpy(last.copy())
