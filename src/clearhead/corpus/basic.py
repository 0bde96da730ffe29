"""The metrics of every survey: how much a head concentrates, and where its weight is.

"Mass" is the weight of a query on a group of keys. `distances` are groups by q - k: 0, 1, 2 to 3,
4 to 7, and so on; the masses of the last 4, 16, 64 and 256 keys are their sums.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..core.functional.ambient import rows_of
from ..core.masks import Mask, dense, duplicate_keys, induction_keys, prefix, window
from ..core.problem.problem import Inputs, Problem
from ..core.stats import Statistic, mass, topk
from .metric import YES_OR_NO, Batch, Bins, LayerCall, Mass, Metric, WithoutBaseline

RECENT = (4, 16, 64, 256)
TOP_KEYS = 4  # of each query, in examples
NEAR = 16
STRIP = 64  # queries


class Entropy(Metric):
    name, formula = "entropy", "-Σ w log w, in nats"
    source = "Zhai et al. 2023, arXiv 2303.06296"

    def __init__(self, context: int) -> None:
        self.bins = Bins(0.0, float(torch.tensor(max(context, 2)).log()))

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return ["entropy"]

    def values(self, call: LayerCall) -> Tensor:
        entropy: Tensor = call["entropy"]
        return entropy


class Evenness(Entropy):
    name, formula = "evenness", "entropy / log n, of the n keys that the query may look at"

    def __init__(self) -> None:
        self.bins = Bins()

    def values(self, call: LayerCall) -> Tensor:
        return super().values(call) / call.allowed.clamp(min=2).log()


class Support(Entropy):
    name, formula = "support", "exp(entropy): the number of keys that equal weights would have"
    examples = False

    def __init__(self, context: int) -> None:
        self.bins = Bins(1.0, float(max(context, 2)), log=True)

    def values(self, call: LayerCall) -> Tensor:
        return super().values(call).exp()


class Largest(Metric):
    name, formula = "largest", "max w"

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return [topk(TOP_KEYS)]

    def values(self, call: LayerCall) -> Tensor:
        weight: Tensor = call["topk"].weights[..., 0]
        return weight


class First(Mass):
    name, formula = "first", "w on key 0 of the context"
    source = "Gu et al. 2024, arXiv 2410.10781"

    def group(self, batch: Batch) -> Mask:
        return FIRST


class Separators(Mass):
    name, formula = "separators", "Σ w over punctuation and ends of lines, without key 0"
    source = "Clark et al. 2019, arXiv 1906.04341"

    def group(self, batch: Batch) -> Mask:
        return separator_keys(batch)


class Duplicate(Mass):
    name, formula = "duplicate", "Σ w over 1 ≤ k ≤ q - 2 with x[k] = x[q]"
    source = "TransformerLens, head_detector"

    def group(self, batch: Batch) -> Mask:
        return duplicate_keys(batch.ids)


class Induction(Mass):
    name, formula = "induction", "Σ w over 1 ≤ k ≤ q - 2 with x[k - 1] = x[q]"
    source = "Olsson et al. 2022, arXiv 2209.11895: prefix matching"

    def group(self, batch: Batch) -> Mask:
        return induction_keys(batch.ids)


class Distances(Mass):
    """The mass of the keys from `low` up to, but not including, `high` tokens before the query."""

    source, examples = "Vig and Belinkov 2019, arXiv 1906.04284", False

    def __init__(self, name: str, low: int, high: int) -> None:
        self.name, self.low, self.high = name, low, high
        last = high - 1
        keys = f"{low} ≤ q - k ≤ {last}" if last > low else f"k = q - {low}" if low else "k = q"
        self.formula = f"Σ w over {keys}" if last > low else f"w on {keys}"
        self.examples = last == low

    def statistics(self, batch: Batch) -> Sequence[mass]:
        return [mass({f"{low}": before(low, high) for low, high in doublings(self.low, self.high)})]

    def values(self, call: LayerCall) -> Tensor:
        parts = list(call["mass"].values())
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class KeyDistance(WithoutBaseline):
    """The distance of a query to its keys, by weight, or its square, for the variance."""

    source, examples = "HeadVis 2026, transformer-circuits.pub/2026/headvis", False

    def __init__(
        self, distances: Callable[[Problem, Inputs], Tensor], context: int, power: int
    ) -> None:
        self.distances = distances
        self.name, self.formula = "distance", "Σ w |q - k|"
        if power == 2:
            self.name, self.formula = "distance_squared", "Σ w |q - k|²"
        self.power, self.bins = power, Bins(0.0, float(max(context - 1, 1) ** power))

    def values(self, call: LayerCall) -> Tensor:
        assert call.problem is not None and call.inputs is not None
        return self.distances(call.problem, call.inputs)[self.power - 1]


class Next(Mass):
    name, formula = "next", "w on k = q + 1; only without a causal mask"

    def group(self, batch: Batch) -> Mask:
        return NEXT


class Ahead(Mass):
    name, formula, examples = "ahead", "Σ w over k > q; only without a causal mask", False

    def group(self, batch: Batch) -> Mask:
        return AHEAD


@lru_cache(maxsize=64)  # metrics that read the same group share its mask
def before(low: int, high: int) -> Mask:
    """Return the keys from `low` up to `high` tokens before the query, as a mask."""
    near = window(before=high - 1, after=0)
    return near & ~window(before=low - 1, after=0) if low else near


@lru_cache(maxsize=1)
def separator_keys(batch: Batch) -> Mask:
    """Return punctuation and ends of lines without key 0, as a mask."""
    keep = batch.separators.clone()
    keep[:, 0] = False
    return dense(keep=keep[:, None, None])


FIRST = prefix(1)
AHEAD = ~window(after=0)
NEXT = AHEAD & window(after=1)


def doublings(low: int, high: int) -> list[tuple[int, int]]:
    """Cut distances at powers of two.

    >>> doublings(0, 8)
    [(0, 1), (1, 2), (2, 4), (4, 8)]
    """
    ends = [0, *(2**n for n in range(high.bit_length() + 1))]
    parts = [(max(a, low), min(b, high)) for a, b in pairwise(ends)]
    return [(a, b) for a, b in parts if a < b]


def distance(context: int) -> list[Metric]:
    """Return the mean distance of a query to its keys, and that of its square."""
    distances = lru_cache(maxsize=1)(_distances)  # which both read; it ends with these metrics
    return [KeyDistance(distances, context, power) for power in (1, 2)]


def _distances(problem: Problem, inputs: Inputs) -> Tensor:
    """Return Σ w |q - k| and Σ w |q - k|² of each query, (2, B, H, T).

    A key has another distance from every query, so the weights of `STRIP` queries are computed at a
    time.
    """
    keys, means = torch.arange(problem.Tk, device=problem.device), []
    for queries in torch.arange(problem.Tq, device=problem.device).split(STRIP):
        weights = rows_of(problem, inputs, queries)
        distances = (queries.unsqueeze(-1) - keys).abs()
        means.append(torch.stack([(weights * distances**n).sum(-1) for n in (1, 2)]))
    return torch.cat(means, -1)


class LooksAt(WithoutBaseline):
    """Whether the largest weight of a query is on a key of one kind.

    A key has the first kind of `KINDS` that fits, so the fractions of all kinds sum to 1.
    """

    bins, examples, source = YES_OR_NO, False, "clearhead"

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"looks_{kind}", kind
        self.formula = f"1 if the largest w is on {KINDS[kind]}, else 0"

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return [topk(TOP_KEYS)]

    def values(self, call: LayerCall) -> Tensor:
        kind = kinds_of(call.batch, call["topk"].keys)
        return (kind == list(KINDS).index(self.kind)).float()


# The kinds of keys, from the first that fits on.
KINDS = {
    "first": "key 0 of the context",
    "self": "the query itself",
    "previous": "the token before",
    "induction": "a token after an earlier copy of the query's token",
    "duplicate": "an earlier copy of the query's token",
    "separator": "punctuation or the end of a line",
    "near": f"another key at most {NEAR} tokens before",
    "far": "a key farther before",
    "ahead": "a later key",
}


@lru_cache(maxsize=1)  # the same for the metrics of all kinds
def kinds_of(batch: Batch, keys: Tensor) -> Tensor:
    """Return the number in `KINDS` of the first of each query's keys, (B, H, T, n), as (B, H, T).

    It is -1 without a key.
    """
    fits = fits_of(batch, keys)
    kind = torch.full(fits.shape[1:], -1)
    for number in reversed(range(len(KINDS))):
        kind.masked_fill_(fits[number], number)
    return kind


@lru_cache(maxsize=1)
def fits_of(batch: Batch, keys: Tensor) -> Tensor:
    """Return which of `KINDS` fit the first of each query's keys, (B, H, T, n), as (K, B, H, T).

    None fits without a key.
    """
    keys = keys[..., 0]
    B, H, T = keys.shape
    index = keys.clamp(min=0).long()
    query = torch.arange(T)
    own = batch.ids.unsqueeze(1)

    def of_keys(x: Tensor, at: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(B, H, T).gather(2, at)

    distance = query - index
    earlier = distance > 0
    fits = [
        index == 0,
        distance == 0,
        distance == 1,
        earlier & (of_keys(batch.ids, (index - 1).clamp(min=0)) == own),
        earlier & (of_keys(batch.ids, index) == own),
        of_keys(batch.separators, index),
        earlier & (distance <= NEAR),
        earlier,
        distance < 0,
    ]
    return torch.stack(fits) & (keys >= 0)


def basic(context: int) -> list[Metric]:
    """Return the default metrics for contexts of up to `context` tokens."""
    recent = [Distances(f"last_{n}", 0, n) for n in RECENT if n < context]
    bands = [
        Distances(f"distance_{low}_{high - 1}", low, high) for low, high in doublings(2, context)
    ]
    return [
        Entropy(context), Evenness(), Support(context), Largest(), First(), Distances("self", 0, 1),
        Distances("previous", 1, 2), Next(), Separators(), Duplicate(), Induction(), *recent,
        *bands, Ahead(), *map(LooksAt, KINDS),
    ]  # fmt: skip
