"""Define what a statistic is, and the data that it gets in two sweeps over the tiles.

The first sweep accumulates, for every query, the softmax state (`problem/online_softmax.py`): the
largest logit m, the sum of exp(x - m), and the accumulators that statistics declare. After it the
sum of a row is final, and a second sweep, if a statistic needs it, sums weights. Letters as in
`problem.py`; w are the weights before dropout, and x the logits that enter softmax.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from ..errors import as_count
from ..masks import Grid, Mask
from ..problem import online_softmax
from ..problem.nan_safe import weighted_sum
from ..problem.problem import Problem, cached
from ..torch_state import loadable
from .per_key import Numbers, PerKey


@loadable
class TopWeights(NamedTuple):
    """The largest weights of each query, and their keys, (B, H, Tq, min(n, Tk)) both."""

    weights: Tensor
    keys: Tensor


Position = TypeVar("Position", int, Tensor)
Result: TypeAlias = Tensor | TopWeights | dict[str, Tensor]
WeightSums: TypeAlias = dict[str, Tensor]  # the sums of the second sweep, by statistic


def map_tensors(result: Result, change: Callable[[Tensor], Tensor]) -> Result:
    """Apply `change` to every tensor of a result."""
    if isinstance(result, TopWeights):
        return TopWeights(*(change(x) for x in result))
    if isinstance(result, dict):
        return {name: change(x) for name, x in result.items()}
    return change(result)


class Statistic(ABC):
    """One or more numbers about the weights of every query, key or pair of bins.

    `shape` is the shape of the result. `call` and `example` show how to write a statistic with
    arguments; a statistic without arguments is requested by its name. `axis` is what the third
    dimension of the result has: "queries", "keys", or "" for neither. `by_layout`: without numbers
    of keys, do the steps of a kernel follow from the arguments of the statistic and the layouts of
    the tensors? Then later calls may repeat them.
    """

    name: ClassVar[str]
    sweep: ClassVar[str]
    formula: ClassVar[str]
    shape: ClassVar[str] = "B H Tq"
    call: ClassVar[str] = ""
    example: ClassVar[str] = ""
    axis: ClassVar[str] = "queries"
    by_layout: ClassVar[bool] = False
    by: Numbers = None  # a number for every key, which multiplies the weights

    def __repr__(self) -> str:
        """Write the call that makes this statistic, without arguments that have their default."""
        parts = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]  # those with arguments are dataclasses
            if getattr(self, f.name) is not f.default
        )
        return f"{self.name}({', '.join(parts)})"

    def check(self, grid: Grid) -> None:  # noqa: B027 (most statistics fit every grid)
        """Raise `BadValue` if the statistic has no meaning for these sizes."""

    @property
    def own_pass(self) -> bool:
        """Is it computed by `key_scores`, in a pass of its own, which merges with no other?"""
        return False

    def read_by(self, positive: bool = False, required: bool = False) -> None:
        """Check the numbers that multiply the weights; for `__post_init__`."""
        if required or self.by is not None:
            object.__setattr__(self, "by", PerKey(self.by, f"{self.name} by", positive=positive))

    @property
    def factors(self) -> PerKey | None:
        """The checked numbers that multiply the weights; None means 1."""
        return cast("PerKey | None", self.by)

    def with_numbers(self, numbers: Tensor) -> "Statistic":
        """Return this statistic with other numbers that multiply the weights."""
        return replace(self, by=numbers)  # type: ignore[type-var]  # statistics are dataclasses

    def must_fit(self, grid: Grid) -> None:
        """Raise `BadValue` if the statistic has no meaning for these sizes, or names more keys.

        `watch` does not check this, because its calls have many sizes.
        """
        self.check(grid)
        if self.by is not None:
            cast(PerKey, self.by).must_fit(grid)

    def with_masks(self, change: Callable[[Mask], Mask]) -> "Statistic":
        """Apply `change` to every mask of the statistic."""
        return self


Statistics: TypeAlias = tuple[Statistic, ...]  # as `parse_stats` returns them


# ------------------------------------------------------------------------------------- first sweep


@dataclass(frozen=True, eq=False)
class Tile:
    """The logits of some queries on some keys, as the first sweep sees them.

    `scores` are x, -inf where masked, and `exps` are exp(x - max), both (B, H, q, k). `max` and
    `sum`, of `exps`, are (B, H, q). The tile is number `index` of the tiles of `width` keys.
    """

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
    base = online_softmax.anchor(top.detach())
    below = (scores - base.unsqueeze(-1)).clamp(min=online_softmax.LOWEST)
    exps = online_softmax.zero_if_masked(below.exp(), scores, base)
    return Tile(queries, keys, width, scores, top, below, exps, exps.sum(-1))


class RowStatistic(Statistic):
    """A statistic that follows from the state of a query after all its keys.

    The state has max, sum, and the accumulator with the name `accumulator`. Several statistics may
    use the same accumulator.
    """

    sweep = "first"
    accumulator: ClassVar[str] = ""

    def least_keys(self, p: Problem) -> int:
        """Return the least number of keys of a tile."""
        return 0

    def empty(self, p: Problem, queries: int) -> online_softmax.Accumulator:
        """Return the accumulator of this many queries before their first key.

        A subclass with an accumulator defines it: here it raises `NotImplementedError`.
        """
        raise NotImplementedError(f"{self.name} declares an accumulator without its initial value")

    def counter(self, p: Problem) -> Callable[[Tile], online_softmax.Accumulator]:
        """Return the function that computes the accumulator of one tile.

        A subclass with an accumulator defines it: here it raises `NotImplementedError`.
        """
        raise NotImplementedError(f"{self.name} declares an accumulator and does not compute it")

    @abstractmethod
    def finish(self, rows: "FinishedRows") -> Result: ...


class FinishedRows(NamedTuple):
    """Rows after all keys and the sink: `lse` and `factor`, (B, H, q).

    A weight is exp(x - max) * factor, so `factor` is the weight at the maximum. Both are finite
    where they have a gradient. A query without keys has factor 0, and an lse of -inf unless it has
    a sink.
    """

    state: online_softmax.State
    lse: Tensor
    factor: Tensor

    def weight(self, part: Tensor) -> Tensor:
        """Convert sums of exp(x - max), (B, H, q, n), to sums of weights."""
        return part * self.factor.unsqueeze(-1)


def finish_rows(state: online_softmax.State, sinks: Tensor | None) -> FinishedRows:
    """Add the sinks, (H,), to the state of all keys, and compute `lse` and `factor`."""
    top = state.max.detach()
    complete = online_softmax.with_sinks(online_softmax.State(top, state.sum, {}), sinks)
    base, empty = online_softmax.anchor(complete.max), complete.sum == 0
    total = complete.sum.masked_fill(empty, 1.0)
    lse = (base + total.log()).masked_fill(empty, online_softmax.MASKED)
    return FinishedRows(state, lse, torch.exp(top - base) / total)


def empty_rows(p: Problem, statistics: Iterable[Statistic], queries: int) -> online_softmax.State:
    """Return the state of this many queries before their first key."""
    more = {
        s.accumulator: s.empty(p, queries)
        for s in statistics
        if isinstance(s, RowStatistic) and s.accumulator
    }
    return online_softmax.State(zeros(p, queries) + online_softmax.MASKED, zeros(p, queries), more)


# ------------------------------------------------------------------------------------ second sweep


@dataclass(frozen=True, eq=False)
class WeightTile:
    """The weights of some queries on some keys, exps (B, H, q, k) times factor (B, H, q).

    `keys` are positions, and `columns` their indices among the keys of the sweep. `pool`
    (B, H, r, q) has the factors of the queries in each of r bins, and 0 for other queries.
    """

    problem: Problem
    queries: slice
    keys: slice
    columns: slice
    scores: Tensor
    exps: Tensor
    factor: Tensor
    pool: Tensor
    members: Tensor | None  # the queries of each bin, (B, H, r, q); None if all factors are finite

    @cached
    def pooled(self) -> Tensor:
        """The weights summed over the queries of each bin, (B, H, r, k)."""
        return weighted_sum(self.pool, self.exps, self.members)


class WeightStatistic(Statistic):
    """A sum of weights. It needs a second sweep, after the sum of each row is known."""

    sweep, axis = "second", ""
    per_key: ClassVar[bool] = True  # does the last dimension have keys, which shards split?

    def query_bins(self, p: Problem) -> int:
        """Return the number of bins of queries that `WeightTile.pooled` must have."""
        return 1

    @abstractmethod
    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        """Return sums of 0, of these queries on this many keys."""

    @abstractmethod
    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        """Add the weights of a tile to sums from `empty` for the queries of the tile."""

    def part(self, total: Tensor, p: Problem, queries: slice) -> Tensor:
        """Return the part of the sums over all queries to which these queries contribute."""
        return total

    def add_part(self, total: Tensor, part: Tensor, p: Problem, queries: slice) -> None:
        """Add the sums of these queries to the sums over all queries."""
        self.part(total, p, queries).add_(part)

    @abstractmethod
    def finish(self, total: Tensor, grid: Grid, queries: Tensor | None) -> Result:
        """Return the result for the `queries` (their positions) of the sweep; None means all."""


def empty_sums(
    p: Problem, statistics: Iterable[Statistic], queries: slice, keys: int
) -> WeightSums:
    return {s.name: s.empty(p, queries, keys) for s in statistics if isinstance(s, WeightStatistic)}


def zeros(p: Problem, *shape: int) -> Tensor:
    return torch.zeros(p.B, p.H, *shape, dtype=p.wide, device=p.device)


def bin_of(position: Position, size: int, bins: int) -> Position:
    """Return the bin of a position: the last i with floor(i size / bins) <= position."""
    return ((position + 1) * bins - 1) // max(size, 1)


def bins_of(queries: slice, size: int, bins: int) -> tuple[int, int]:
    """Return the first bin with one of these queries, and the number of such bins."""
    if queries.start == queries.stop:
        return 0, 0
    first, last = bin_of(queries.start, size, bins), bin_of(queries.stop - 1, size, bins)
    return first, last + 1 - first


def checked_count(value: object, statistic: str, name: str) -> int:
    rule = f"{name} is a whole number, 1 or more."
    return as_count(f"{statistic} got {name}", value, rule, f"pass for example {name}=8.", least=1)
