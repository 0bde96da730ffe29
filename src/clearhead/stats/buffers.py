"""Which sums the requested statistics need, and their initial values."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..masks.key_ranges import KeyRanges
from ..problem.problem import Problem
from .state import NOTHING, RowStats, WeightSums
from .statistics import Effective, Entropy, Received, Statistic, bin_of, map, mass, rows, topk


@dataclass(frozen=True, eq=False)
class Buffers:
    """`statistics` holds each kind at most once, which `parse_stats` ensures."""

    problem: Problem
    statistics: tuple[Statistic, ...]

    @cached_property
    def weights(self) -> bool:
        """Does anything need the second sweep?"""
        return any(s.sweep == "second" for s in self.statistics)

    @cached_property
    def moment(self) -> bool:
        return any(isinstance(s, (Entropy, Effective)) for s in self.statistics)

    @cached_property
    def best(self) -> int:
        return sum(s.n for s in self.statistics if isinstance(s, topk))

    @cached_property
    def groups(self) -> list[KeyRanges]:
        p = self.problem
        masks = [m for s in self.statistics if isinstance(s, mass) for m in s.masks]
        return [m.key_ranges(p.grid, p.device) for m in masks]

    @cached_property
    def received(self) -> bool:
        return any(isinstance(s, Received) for s in self.statistics)

    @cached_property
    def bins(self) -> tuple[int, int] | None:
        """How many bins of queries and of keys the map has."""
        p = self.problem
        maps = [s for s in self.statistics if isinstance(s, map)]
        return (min(maps[0].rows, p.Tq), min(maps[0].cols, p.Tk)) if maps else None

    @cached_property
    def exact(self) -> list[int] | None:
        """The queries whose exact rows were requested."""
        lists = [s.places(self.problem.grid) for s in self.statistics if isinstance(s, rows)]
        return lists[0] if lists else None

    def exact_in(self, queries: slice) -> list[int]:
        """Which of them, by their place in the list, are among these queries."""
        statistics = enumerate(self.exact or ())
        return [n for n, i in statistics if queries.start <= i < queries.stop]

    def bins_of(self, queries: slice) -> tuple[int, int]:
        """The first bin that these queries fall into, and how many; one for all without a map."""
        if self.bins is None:
            return 0, 1
        ends = torch.tensor([queries.start, queries.stop - 1], device="cpu")
        first, last = bin_of(ends, self.problem.Tq, self.bins[0]).tolist()
        return first, last + 1 - first

    def no_rows(self, size: int) -> RowStats:
        """The row statistics of `size` queries before their first key."""
        best = self._zeros(size, self.best) + NOTHING if self.best else None
        return RowStats(
            self._zeros(size) + NOTHING,
            self._zeros(size),
            self._zeros(size) if self.moment else None,
            self._zeros(size, len(self.groups)) if self.groups else None,
            best,
            None if best is None else torch.full_like(best, -1, dtype=torch.long),
        )

    def no_sums(self, keys: int, bins: int | None = None, exact: int | None = None) -> WeightSums:
        """Weight sums of zero, for this many keys, bins of queries and exact rows."""
        rows_, cols = self.bins or (0, 0)
        n = len(self.exact or ())
        return WeightSums(
            self._zeros(keys) if self.received else None,
            None if self.bins is None else self._zeros(rows_ if bins is None else bins, cols),
            None if self.exact is None else self._zeros(n if exact is None else exact, keys),
        )

    def _zeros(self, *shape: int) -> Tensor:
        p = self.problem
        return torch.zeros(p.B, p.H, *shape, dtype=p.wide, device=p.device)
