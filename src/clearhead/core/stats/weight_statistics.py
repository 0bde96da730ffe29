"""Define the statistics that sum weights of many queries, in a second sweep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadType, BadValue, as_number, is_iterable, must_be_among, whole_number
from ..masks import Grid
from ..problem.nan_safe import weighted_sum
from ..problem.online_softmax import MASKED
from ..problem.problem import Problem
from .per_key import Numbers
from .statistic import WeightStatistic, WeightTile, bin_of, bins_of, checked_count, zeros

REDUCTIONS = "sum", "mean", "max"  # of the numbers of a key, over queries


@dataclass(frozen=True, repr=False)
class received(WeightStatistic):
    """The weight that each key receives, summed over the queries, per query head.

    Methods that drop keys score them so: H2O by the sum, SnapKV with ``last=``. The kernels compute
    the sum, "received". With any argument but `by`, torch computes it in a pass of its own, in
    float64, tile by tile, and it has no gradient.

    Args:
        by: a number n for every key, (Tk,), (H, Tk) or (B, H, Tk), that multiplies the result,
            without a gradient; None means 1. In `watch`, "value" means the norms of the values
            after the output projection.
        power: sum ``w ** power``, with a power of 1 or more.
        reduce: "sum"; "mean" over the queries that may look at the key, 0 without one; or "max".
        last: only the last queries that may look at any key, so many per text; None means all.

    Raises `BadType` if `by` is not a tensor of real numbers, or `last` not a whole number.
    Raises `BadValue` if `by` has another shape or is a name outside `watch`, if `power` or `last`
    is below 1, for another `reduce`, and with arguments but `by` over ranks.

    Source: Zhang et al. 2023, "H2O"; Li et al. 2024, "SnapKV".
    """

    by: Numbers = None
    power: float = 1
    reduce: str = "sum"
    last: int | None = None

    name, formula, shape = "received", "Σ_q w", "B H Tk"
    axis, by_layout = "keys", True

    def __post_init__(self) -> None:
        self.read_by()
        name, rule, hint = f"{self.name} got power", "it is a number of 1 or more.", "pass power=2."
        as_number(name, self.power, rule, hint, lambda power: 1 <= power < math.inf)
        rule = f"reduce is {', '.join(REDUCTIONS)}."
        must_be_among(REDUCTIONS, "reduce", self.reduce, rule, 'pass for example reduce="max".')
        if self.last is not None:
            object.__setattr__(self, "last", checked_count(self.last, self.name, "last"))

    @property
    def own_pass(self) -> bool:
        return (self.power, self.reduce, self.last) != (1, "sum", None)

    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        return zeros(p, keys)

    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        total[..., tile.columns] = tile.pooled.sum(2)

    def finish(self, total: Tensor, grid: Grid, queries: Tensor | None) -> Tensor:
        if self.factors is None:
            return total
        assert self.factors.numbers is not None
        return (total * self.factors.numbers.to(total)).masked_fill(total == 0, 0.0)


@dataclass(frozen=True, repr=False)
class drop_error(received):
    """The error of the outputs if a key is dropped: the sum of ``|z' - z|²`` over the queries.

    z is the output of a query, and z' the output without the key, for each query head. It is
    ``w / (1 - w) |v - z|``, computed from z' where w is near 1. A query whose only key is dropped
    has the output 0. It is a pass of its own, in float64, tile by tile, and has no gradient.

    Args:
        by, reduce, last: as in `received`.
        power: sum ``|z' - z| ** power``; 2 is the squared error of DropKV.

    Raises the errors of `received`.
    """

    power: float = 2

    name, formula = "drop_error", "Σ_q |z' - z|², where z' is the output without the key"
    own_pass = True
    by_layout = False


@dataclass(frozen=True, repr=False)
class pooled(WeightStatistic):
    """The pooled matrix: the weight on a bin of keys, averaged over the queries of a bin.

    T positions are split into n nearly equal bins: bin i has the positions from floor(i T / n) up
    to floor((i + 1) T / n). There are never more bins than positions, so the map of a short text is
    exact. A row of the map sums to 1, or to less with sinks or fully masked queries.

    `by` is a number for every key, (Tk,), (H, Tk) or (B, H, Tk), that multiplies the weights,
    without a gradient. In `watch`, "value" means the norms of the values after the output
    projection.

    Raises `BadValue` if `rows` or `cols` is below 1, `BadType` if they are not whole numbers, and
    for `by` the errors of `received`.
    """

    rows: int
    cols: int
    by: Numbers = None

    name, formula = "pooled", "mean over the queries of a bin of Σ w over a bin of keys"
    shape = "B H min(rows,Tq) min(cols,Tk)"
    call, example = "pooled(rows, cols)", "pooled(64, 64)"
    per_key, by_layout = False, True

    def __post_init__(self) -> None:
        for side in ("rows", "cols"):
            object.__setattr__(self, side, checked_count(getattr(self, side), "pooled", side))
        self.read_by()

    def query_bins(self, p: Problem) -> int:
        return min(self.rows, p.Tq)

    def key_bins(self, p: Problem) -> int:
        return min(self.cols, p.Tk)

    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        return zeros(p, bins_of(queries, p.Tq, self.query_bins(p))[1], self.key_bins(p))

    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        p, weights = tile.problem, tile.pooled
        key_bin = bin_of(torch.arange(p.Tk, device=p.device)[tile.keys], p.Tk, self.key_bins(p))
        lo, hi = int(key_bin[0]), int(key_bin[-1]) + 1
        into = (key_bin.unsqueeze(-1) == torch.arange(lo, hi, device=p.device)).to(weights)
        if self.factors is not None:
            numbers = self.factors.of(p)[..., None, tile.keys]
            weights = (weights * numbers).masked_fill(weights == 0, 0.0)
        if tile.members is None:
            total[..., lo:hi] += weights @ into
        else:  # so that NaN affects only the bin of its key
            total[..., lo:hi] += weighted_sum(into.T, weights.mT, into.T > 0).mT

    def part(self, total: Tensor, p: Problem, queries: slice) -> Tensor:
        return total.narrow(2, *bins_of(queries, p.Tq, self.query_bins(p)))

    def finish(self, total: Tensor, grid: Grid, queries: Tensor | None) -> Tensor:
        bins = min(self.rows, grid.Tq)
        if queries is None:
            queries = torch.arange(grid.Tq, device=total.device)
        bin_index = bin_of(queries, grid.Tq, bins)
        ones = torch.ones_like(bin_index)  # torch.bincount would wait for a GPU
        count = ones.new_zeros(bins).index_add_(0, bin_index, ones).clamp(min=1)
        return total / count.to(total).unsqueeze(-1)


@dataclass(frozen=True, repr=False)
class exact_rows(WeightStatistic):
    """The exact weights of some queries, in their order; -1 is the last query.

    Raises `BadType` unless `queries` is a list of whole numbers, and `BadValue` in a call that has
    no such query.
    """

    queries: Sequence[int]

    name, formula, shape = "exact_rows", "w of the requested queries", "B H n Tk"
    call, example = "exact_rows([queries])", "exact_rows([0, -1])"
    by_layout = True

    def __post_init__(self) -> None:
        queries = self.queries
        listed = is_iterable(queries) and not isinstance(queries, (str, bytes))
        positions = [whole_number(i) for i in queries] if listed else [None]
        if None in positions:
            rule = "exact_rows takes a list of positions of queries, which are whole numbers."
            hint = "pass for example exact_rows([0, 5, -1])."
            raise BadType(f"exact_rows got {queries!r}.", rule, hint)
        object.__setattr__(self, "queries", tuple(positions))

    def check(self, grid: Grid) -> None:
        for i in self.queries:
            if not -grid.Tq <= i < grid.Tq:
                gave = f"exact_rows got query {i}, and there are {grid.Tq}."
                rule = "positions count from 0 and stay below the size; -1 is the last."
                hint = f"pass {-grid.Tq} to {grid.Tq - 1}." if grid.Tq else "pass exact_rows([])."
                raise BadValue(gave, rule, hint)

    def positions(self, grid: Grid) -> list[int]:
        return [i % grid.Tq for i in self.queries]

    def among(self, p: Problem, queries: slice) -> list[int]:
        """Return the indices in the result of the rows that are among these queries."""
        positions = enumerate(self.positions(p.grid))
        return [n for n, i in positions if queries.start <= i < queries.stop]

    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        return zeros(p, len(self.among(p, queries)), keys)

    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        p, queries = tile.problem, tile.queries
        positions = self.positions(p.grid)
        in_tile = [positions[n] - queries.start for n in self.among(p, queries)]
        exact = tile.exps[:, :, in_tile] * tile.factor[:, :, in_tile].unsqueeze(-1)
        if tile.members is not None:  # masked keys have weight 0 even in a row of NaN
            exact = exact.masked_fill(tile.scores[:, :, in_tile] == MASKED, 0.0)
        total[..., tile.columns] = exact

    def part(self, total: Tensor, p: Problem, queries: slice) -> Tensor:
        return total[:, :, self.among(p, queries)]

    def add_part(self, total: Tensor, part: Tensor, p: Problem, queries: slice) -> None:
        if rows := self.among(p, queries):
            total[:, :, rows] = part

    def finish(self, total: Tensor, grid: Grid, queries: Tensor | None) -> Tensor:
        """Return the rows that are among the queries."""
        if queries is None or len(queries) == grid.Tq:  # without reading `queries` from a GPU
            return total
        positions = torch.tensor(self.positions(grid), dtype=torch.long, device="cpu")
        swept = torch.isin(positions, queries.cpu())
        return total[:, :, swept.to(total.device)]
