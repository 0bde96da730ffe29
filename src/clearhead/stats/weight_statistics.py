"""The statistics that add up weights of many queries, in a second sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from ..masks import Grid
from ..problem.nan_safe import weighted_sum
from ..problem.online_softmax import MASKED
from ..problem.problem import Problem
from .per_key import Numbers
from .statistic import WeightStatistic, WeightTile, bin_of, bins_of, checked_count, zeros


@dataclass(frozen=True)
class received(WeightStatistic):
    """The weight each key receives, summed over the queries, per query head.

    `received(by=n)` multiplies it by a number for every key, (Tk,), (H, Tk) or (B, H, Tk), which
    receives no gradient; "value" in `watch` takes the norms of what each value writes. Without
    `by`, "received" is enough.
    """

    by: Numbers = None

    name, formula, shape = "received", "Σ_q w", "B H Tk"

    def __post_init__(self) -> None:
        self.read_by()

    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        return zeros(p, keys)

    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        total[..., tile.columns] = tile.pooled.sum(2)

    def finish(self, total: Tensor, grid: Grid, queries: Tensor) -> Tensor:
        if self.factors is None:
            return total
        assert self.factors.numbers is not None
        return (total * self.factors.numbers.to(total)).masked_fill(total == 0, 0.0)


@dataclass(frozen=True)
class pooled(WeightStatistic):
    """The matrix pooled: the mean, over the queries of a bin, of the weight on a bin of keys.

    T positions fall into n bins as evenly as they can: bin i holds those from floor(i T / n) up to
    floor((i + 1) T / n). There are never more bins than positions, so a short text is shown as it
    is. Every row of the map sums to 1, like a row of weights (less what a sink takes and blind
    queries miss).

    With `by`, a number for every key, (Tk,), (H, Tk) or (B, H, Tk), weights are multiplied by it;
    "value" in `watch` takes the norms of what each value writes. It receives no gradient.
    """

    rows: int
    cols: int
    by: Numbers = None

    name, formula = "pooled", "mean over the queries of a bin of Σ w over a bin of keys"
    shape = "B H min(rows,Tq) min(cols,Tk)"
    call, example = "pooled(rows, cols)", "pooled(64, 64)"
    per_key = False

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
        else:  # NaN stays in the bin of its key
            total[..., lo:hi] += weighted_sum(into.T, weights.mT, into.T > 0).mT

    def part(self, total: Tensor, p: Problem, queries: slice) -> Tensor:
        return total.narrow(2, *bins_of(queries, p.Tq, self.query_bins(p)))

    def finish(self, total: Tensor, grid: Grid, queries: Tensor) -> Tensor:
        bins = min(self.rows, grid.Tq)
        place = bin_of(queries, grid.Tq, bins)  # torch.bincount would read it: a GPU waits
        count = place.new_zeros(bins).index_add_(0, place, torch.ones_like(place)).clamp(min=1)
        return total / count.to(total).unsqueeze(-1)


@dataclass(frozen=True)
class exact_rows(WeightStatistic):
    """The exact weights of some queries, in the order asked for; -1 is the last query."""

    queries: Sequence[int]

    name, formula, shape = "exact_rows", "w of the queries asked for", "B H n Tk"
    call, example = "exact_rows([queries])", "exact_rows([0, -1])"

    def __post_init__(self) -> None:
        given = self.queries
        listed = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
        places = [whole_number(i) for i in given] if listed else [None]
        if None in places:
            raise BadType(
                f"exact_rows got {given!r}.",
                "exact_rows takes the positions of queries, whole numbers in a list.",
                "pass for example exact_rows([0, 5, -1]).",
            )
        object.__setattr__(self, "queries", tuple(places))

    def check(self, grid: Grid) -> None:
        for i in self.queries:
            if not -grid.Tq <= i < grid.Tq:
                raise BadValue(
                    f"exact_rows got query {i}, and there are {grid.Tq}.",
                    "positions count from 0 and stay below the size; -1 is the last.",
                    f"ask for queries from {-grid.Tq} to {grid.Tq - 1}."
                    if grid.Tq
                    else "ask for no rows, exact_rows([]).",
                )

    def places(self, grid: Grid) -> list[int]:
        return [i % grid.Tq for i in self.queries]

    def among(self, p: Problem, queries: slice) -> list[int]:
        """Which of the rows, by their index in the result, are those of these queries."""
        places = enumerate(self.places(p.grid))
        return [n for n, i in places if queries.start <= i < queries.stop]

    def empty(self, p: Problem, queries: slice, keys: int) -> Tensor:
        return zeros(p, len(self.among(p, queries)), keys)

    def add_tile(self, total: Tensor, tile: WeightTile) -> None:
        p, queries = tile.problem, tile.queries
        places = self.places(p.grid)
        here = [places[n] - queries.start for n in self.among(p, queries)]
        exact = tile.exps[:, :, here] * tile.share[:, :, here].unsqueeze(-1)
        if tile.members is not None:  # a row of NaN gives masked keys 0
            exact = exact.masked_fill(tile.scores[:, :, here] == MASKED, 0.0)
        total[..., tile.columns] = exact

    def part(self, total: Tensor, p: Problem, queries: slice) -> Tensor:
        return total[:, :, self.among(p, queries)]

    def add_part(self, total: Tensor, part: Tensor, p: Problem, queries: slice) -> None:
        if here := self.among(p, queries):
            total[:, :, here] = part

    def finish(self, total: Tensor, grid: Grid, queries: Tensor) -> Tensor:
        """Only the rows that are among the queries."""
        if len(queries) == grid.Tq:  # all: on a GPU they need not be read
            return total
        places = torch.tensor(self.places(grid), dtype=torch.long, device="cpu")
        held = torch.isin(places, queries.cpu())
        return total[:, :, held.to(total.device)]
