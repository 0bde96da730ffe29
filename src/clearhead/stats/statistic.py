"""What a statistic is, and what the two sweeps show it.

The first sweep accumulates, for every query, the softmax state (`problem/online_softmax.py`): the
largest logit m, the sum of exp(x - m), and what statistics declare beside them. Then the sum of a
row is final, and a second sweep, if a statistic needs it, adds up weights. Letters as in
`problem.py`; w are the weights, without dropout, x the logits as they enter softmax.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from ..errors import as_count
from ..masks import Grid, Mask
from ..problem.nan_safe import weighted_sum
from ..problem.online_softmax import (
    LOWEST,
    MASKED,
    Accumulator,
    State,
    anchor,
    with_sinks,
    zero_if_masked,
)
from ..problem.problem import Problem, cached
from ..torch_state import loadable
from .per_key import Numbers, PerKey


@loadable
class TopWeights(NamedTuple):
    """The largest weights of each query and the keys they lie on, (B, H, Tq, n) both."""

    weights: Tensor
    keys: Tensor


Position = TypeVar("Position", int, Tensor)
Result: TypeAlias = Tensor | TopWeights | dict[str, Tensor]
WeightSums: TypeAlias = dict[str, Tensor]  # what the second sweep adds up, by statistic


def map_tensors(result: Result, change: Callable[[Tensor], Tensor]) -> Result:
    """The result with every tensor in it changed."""
    if isinstance(result, TopWeights):
        return TopWeights(*(change(x) for x in result))
    if isinstance(result, dict):
        return {name: change(x) for name, x in result.items()}
    return change(result)


class Statistic(ABC):
    """One number, or a few, about the weights of every query, key or pair of bins.

    `shape` is that of the result, and `call` and `example` are how a statistic with arguments is
    written; one without is requested by its name.
    """

    name: ClassVar[str]
    sweep: ClassVar[str]
    formula: ClassVar[str]
    shape: ClassVar[str] = "B H Tq"
    call: ClassVar[str] = ""
    example: ClassVar[str] = ""
    by: Numbers = None  # what weights are multiplied by, a number for every key

    def check(self, grid: Grid) -> None:  # noqa: B027 (most statistics fit every grid)
        """Raise `BadValue` if it has no meaning for these sizes."""

    def read_by(self, positive: bool = False) -> None:
        """Check the numbers that weights are multiplied by; for `__post_init__`."""
        if self.by is not None:
            object.__setattr__(self, "by", PerKey(self.by, f"{self.name} by", positive=positive))

    @property
    def factors(self) -> PerKey | None:
        """What weights are multiplied by, checked; None means 1."""
        return cast("PerKey | None", self.by)

    def with_numbers(self, numbers: Tensor) -> "Statistic":
        """The same statistic, whose weights are multiplied by these numbers."""
        return replace(self, by=numbers)  # type: ignore[type-var]  # those with `by` are dataclasses

    def must_fit(self, grid: Grid) -> None:
        """Raise `BadValue` if it names more keys than one call of these sizes has. `watch` sees
        calls of many sizes, and does without."""
        if self.factors is not None:
            self.factors.must_fit(grid)

    def with_masks(self, change: Callable[[Mask], Mask]) -> "Statistic":
        """The same statistic, with every mask in it changed."""
        return self


# ------------------------------------------------------------------------------------- first sweep


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries on some keys: x as `scores`, -inf where masked, and exp(x - max) as `exps`, both
    (B, H, q, k); the maximum and the sum of `exps`, (B, H, q). It is tile number `index` of the
    keys, in tiles of `width`."""

    queries: slice
    keys: slice
    width: int
    scores: Tensor
    max: Tensor
    below: Tensor  # x - max, and a large negative number where masked
    exps: Tensor
    sum: Tensor

    @property
    def index(self) -> int:
        return self.keys.start // self.width


def tile_of(scores: Tensor, queries: slice, keys: slice, width: int) -> Tile:
    top = scores.amax(-1)
    base = anchor(top.detach())
    below = (scores - base.unsqueeze(-1)).clamp(min=LOWEST)
    exps = zero_if_masked(below.exp(), scores, base)
    return Tile(queries, keys, width, scores, top, below, exps, exps.sum(-1))


class RowStatistic(Statistic):
    """Known once all keys of a query were seen: from its maximum, its sum, and what is accumulated
    beside them under the name `accumulator`. Statistics may share an accumulator."""

    sweep = "first"
    accumulator: ClassVar[str] = ""

    def least_keys(self, p: Problem) -> int:
        """How many keys a tile has at least."""
        return 0

    def empty(self, p: Problem, queries: int) -> Accumulator:
        """The accumulator of this many queries before their first key."""
        raise NotImplementedError(f"{self.name} declares an accumulator without its initial value")

    def counter(self, p: Problem) -> Callable[[Tile], Accumulator]:
        """The function that computes the accumulator of one tile."""
        raise NotImplementedError(f"{self.name} declares an accumulator and does not compute it")

    @abstractmethod
    def finish(self, rows: "FinishedRows") -> Result: ...


class FinishedRows(NamedTuple):
    """Rows that have seen every key and the sink: `lse` and `share`, (B, H, q).

    `share` is the weight of a key that scores the maximum, so a weight is exp(x - max) * share.
    Both are finite wherever they are differentiated; a query without keys has share 0, and -inf for
    lse unless a sink gives it a sum.
    """

    state: State
    lse: Tensor
    share: Tensor

    def weight(self, part: Tensor) -> Tensor:
        """Sums of exp(x - max), (B, H, q, ...), as weights."""
        return part * self.share.reshape(*self.share.shape, *[1] * (part.dim() - 3))


def finish_rows(state: State, sinks: Tensor | None) -> FinishedRows:
    """Let the sinks, (H,), take part, and divide."""
    top = state.max.detach()
    complete = with_sinks(State(top, state.sum, {}), sinks)
    base, nothing = anchor(complete.max), complete.sum == 0
    total = complete.sum.masked_fill(nothing, 1.0)
    lse = (base + total.log()).masked_fill(nothing, MASKED)
    return FinishedRows(state, lse, torch.exp(top - base) / total)


def empty_rows(p: Problem, statistics: Iterable[Statistic], queries: int) -> State:
    """The state of this many queries before their first key."""
    more = {
        s.accumulator: s.empty(p, queries)
        for s in statistics
        if isinstance(s, RowStatistic) and s.accumulator
    }
    return State(zeros(p, queries) + MASKED, zeros(p, queries), more)


# ------------------------------------------------------------------------------------ second sweep


@dataclass(frozen=True, eq=False)
class WeightTile:
    """The weights of some queries on some keys, as exps * share: (B, H, q, k) and (B, H, q).

    `keys` are positions, and `columns` says where they stand among the keys of the sweep. `pool`
    (B, H, r, q) holds, for each of r bins of queries, the shares of the queries in it.
    """

    problem: Problem
    queries: slice
    keys: slice
    columns: slice
    scores: Tensor
    exps: Tensor
    share: Tensor
    pool: Tensor
    members: Tensor | None  # of each bin, (B, H, r, q); None if all shares are finite

    @cached
    def pooled(self) -> Tensor:
        """The weights summed over the queries of each bin, (B, H, r, k)."""
        return weighted_sum(self.pool, self.exps, self.members)


class WeightStatistic(Statistic):
    """A sum of weights, so it needs a second sweep, after the sum of each row is known."""

    sweep = "second"
    per_key: ClassVar[bool] = True  # does the last dimension hold keys, which shards divide?

    def query_bins(self, p: Problem) -> int:
        """How many bins of queries it needs `WeightTile.pooled` to tell apart."""
        return 1

    @abstractmethod
    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        """The sum of no weights, of these queries on this many keys."""

    @abstractmethod
    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        """Add the weights of a tile to a tensor made by `empty` for the queries of the tile."""

    def part(self, total: Tensor, p: Problem, queries: slice) -> Tensor:
        """What these queries contribute to, of a tensor made by `empty` for all queries."""
        return total

    def add_part(self, total: Tensor, part: Tensor, p: Problem, queries: slice) -> None:
        """Add what these queries gave."""
        self.part(total, p, queries).add_(part)

    @abstractmethod
    def finish(self, total: Tensor, grid: Grid, queries: Tensor) -> Result:
        """The result for the `queries` (their positions) that were swept."""


def empty_sums(
    p: Problem, statistics: Iterable[Statistic], queries: slice, keys: int
) -> WeightSums:
    return {s.name: s.empty(p, queries, keys) for s in statistics if isinstance(s, WeightStatistic)}


def zeros(p: Problem, *shape: int) -> Tensor:
    return torch.zeros(p.B, p.H, *shape, dtype=p.wide, device=p.device)


def bin_of(position: Position, size: int, bins: int) -> Position:
    """The bin of a position: the i with floor(i size / bins) <= position < the next."""
    return ((position + 1) * bins - 1) // max(size, 1)


def bins_of(queries: slice, size: int, bins: int) -> tuple[int, int]:
    """The first bin that these queries fall into, and how many."""
    if queries.start == queries.stop:
        return 0, 0
    first, last = bin_of(queries.start, size, bins), bin_of(queries.stop - 1, size, bins)
    return first, last + 1 - first


def checked_count(value: object, statistic: str, name: str) -> int:
    rule = f"{name} says how many, a whole number, 1 or more."
    return as_count(f"{statistic} got {name}", value, rule, f"pass for example {name}=8.", least=1)
