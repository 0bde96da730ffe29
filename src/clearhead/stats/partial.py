"""Statistics of a part of the attention matrix, and how parts merge.

A `Partial` covers some queries and some keys, every pair of them. Two merge when they share their
queries and their keys are disjoint (shards of a cache, of a ring), or share their keys and their
queries are disjoint (chunks of a long text), in any order: the sums are exact but for rounding.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import BadValue
from ..problem.online_softmax import State, anchor, merge
from ..problem.problem import Problem
from .statistic import (
    FinishedRows,
    Result,
    RowStatistic,
    Statistic,
    WeightStatistic,
    WeightSums,
    finish_rows,
)


@dataclass(frozen=True, eq=False)
class Partial:
    """Statistics of `queries` x `keys`, positions in rising order, (q,) and (k,).

    `rows` is what the first sweep gave and `sums` what the second gave; None where it was not made.
    An engine that accumulates while it computes the output can build one itself: the state needs
    max and sum, and the accumulators that the statistics name.
    """

    problem: Problem
    statistics: tuple[Statistic, ...]
    queries: Tensor
    keys: Tensor
    rows: State | None
    sums: WeightSums | None

    @classmethod
    def of_all(
        cls,
        problem: Problem,
        statistics: tuple[Statistic, ...],
        rows: State | None,
        sums: WeightSums | None = None,
    ) -> "Partial":
        """What was counted over all queries and keys."""
        q, k = (torch.arange(size, device=problem.device) for size in (problem.Tq, problem.Tk))
        return cls(problem, statistics, q, k, rows, sums)

    @classmethod
    def of_lse(cls, problem: Problem, statistics: tuple[Statistic, ...], lse: Tensor) -> "Partial":
        """Where the log-sum-exp alone was asked for, which comes with the answer and has a
        gradient. The logits of a query, and its sink, count as one logit, the log-sum-exp."""
        lse = lse.to(problem.wide)
        top = lse.detach()
        state = State(top, torch.exp(lse - anchor(top)), {})
        return cls.of_all(replace(problem, sinks=None), statistics, state)

    @property
    def lse(self) -> Tensor:
        """(B, H, q), for the second step over key shards. Raises before all keys were seen."""
        return self._final().lse

    def merge(self, other: "Partial") -> "Partial":
        """Both parts as one. Raises `BadValue` unless together they are again all pairs of some
        queries and some keys, each pair once. The same pairs merge if one part holds the first
        sweep and the other the second; else the result holds the sweeps that both have made."""
        if self.statistics != other.statistics:
            raise self._refused(other, "they hold different statistics")
        same_queries = torch.equal(self.queries, other.queries)
        same_keys = torch.equal(self.keys, other.keys)
        sweeps = [(p.rows is not None, p.sums is not None) for p in (self, other)]
        if same_queries and same_keys and sorted(sweeps) == [(False, True), (True, False)]:
            rows, sums = self.rows or other.rows, self.sums or other.sums
            return Partial(self.problem, self.statistics, self.queries, self.keys, rows, sums)
        if not any(a and b for a, b in zip(*sweeps, strict=True)):
            raise self._refused(other, "they have made different sweeps")
        if same_queries and (joined := _disjoint(self.keys, other.keys)):
            return self._along_keys(other, *joined)
        if same_keys and (joined := _disjoint(self.queries, other.queries)):
            return self._along_queries(other, *joined)
        raise self._refused(other, "they overlap, or leave a corner uncovered")

    def finish(self) -> dict[str, Result]:
        """The statistics of the sweeps made, by name, in the order asked for, with all dimensions.

        Rows need all keys. Sums are over the queries held: a chunk gives what its own queries put
        on each key. Raises `BadValue` while keys are missing.
        """
        found: dict[str, Result] = {}
        final = None if self.rows is None else self._final()
        for statistic in self.statistics:
            if isinstance(statistic, RowStatistic) and final is not None:
                found[statistic.name] = statistic.finish(final)
            if isinstance(statistic, WeightStatistic) and self.sums is not None:
                total = self.sums[statistic.name]
                found[statistic.name] = statistic.finish(total, self.problem.grid, self.queries)
        return found

    def __repr__(self) -> str:
        made = [n for n, x in (("first", self.rows), ("second", self.sums)) if x is not None]
        return (
            f"partial of {len(self.queries)} of {self.problem.Tq} queries x {len(self.keys)} of "
            f"{self.problem.Tk} keys, {' and '.join(made)} sweep, "
            f"of {', '.join(s.name for s in self.statistics) or 'nothing'}"
        )

    # ------------------------------------------------------------------------------------ inside

    def _final(self) -> FinishedRows:
        if self.rows is None or len(self.keys) < self.problem.Tk:
            raise BadValue(
                f"finish was asked of a {self!r}.",
                "the sum of a row is known when the first sweep has seen all its keys.",
                "merge it with the partials of the other keys first.",
            )
        return finish_rows(self.rows, self.problem.sinks)

    def _along_keys(self, other: "Partial", keys: Tensor, order: Tensor) -> "Partial":
        rows = sums = None
        if self.rows is not None and other.rows is not None:
            rows = merge(self.rows, other.rows)
        if self.sums is not None and other.sums is not None:
            sums = {
                s.name: torch.cat([self.sums[s.name], other.sums[s.name]], -1)[..., order]
                if s.per_key
                else self.sums[s.name] + other.sums[s.name]
                for s in self.statistics
                if isinstance(s, WeightStatistic)
            }
        return Partial(self.problem, self.statistics, self.queries, keys, rows, sums)

    def _along_queries(self, other: "Partial", queries: Tensor, order: Tensor) -> "Partial":
        rows = sums = None
        if self.rows is not None and other.rows is not None:
            rows = self.rows.map(lambda a, b: torch.cat([a, b], 2)[:, :, order], other.rows)
        if self.sums is not None and other.sums is not None:
            sums = {name: x + other.sums[name] for name, x in self.sums.items()}
        return Partial(self.problem, self.statistics, queries, self.keys, rows, sums)

    def _refused(self, other: "Partial", why: str) -> BadValue:
        return BadValue(
            f"merge got a {self!r} and a {other!r}: {why}.",
            "partials merge when they share their queries and not one key, or their keys and not "
            "one query, and hold the same statistics of a common sweep; or hold the two sweeps of "
            "the same pairs.",
            "merge the key shards of each chunk of queries first, then the chunks.",
        )


def _disjoint(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """All positions in rising order, and where each stands in cat([a, b]); None if any repeats."""
    positions, order = torch.cat([a, b]).sort(stable=True)
    if bool((positions[1:] == positions[:-1]).any()):
        return None
    return positions, order
