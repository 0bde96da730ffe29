"""Define the statistics that sum weights of many queries, in a second sweep."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadType, BadValue, is_iterable, whole_number
from ..masks import Grid
from ..problem.nan_safe import weighted_sum
from ..problem.online_softmax import MASKED
from ..problem.problem import Problem
from .per_key import Numbers
from .statistic import WeightStatistic, WeightTile, bin_of, bins_of, checked_count, zeros


@dataclass(frozen=True, repr=False)
class received(WeightStatistic):
    """The weight that each key receives, summed over the queries, per query head.

    `received(by=n)` multiplies it by a number for every key, (Tk,), (H, Tk) or (B, H, Tk), without
    a gradient. In `watch`, "value" means the norms of the values after the output projection.
    Without `by`, write "received".

    Raises `BadType` if `by` is not a tensor of real numbers, and `BadValue` if it has another shape
    or is a name outside `watch`.
    """

    by: Numbers = None

    name, formula, shape = "received", "Σ_q w", "B H Tk"
    axis, by_layout = "keys", True

    def __post_init__(self) -> None:
        self.read_by()

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
                raise BadValue(
                    f"exact_rows got query {i}, and there are {grid.Tq}.",
                    "positions count from 0 and stay below the size; -1 is the last.",
                    f"pass queries from {-grid.Tq} to {grid.Tq - 1}."
                    if grid.Tq
                    else "request no rows, exact_rows([]).",
                )

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
