"""Hold statistics of a part of the attention matrix, and merge parts.

A `Partial` covers all pairs of some queries and some keys. Two merge if they have the same queries
and disjoint keys (shards of a cache or of a ring), or the same keys and disjoint queries (chunks of
a long text). The order does not matter, except for rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadValue
from ..problem.online_softmax import MASKED, State, merge
from ..problem.problem import Problem
from .statistic import (
    FinishedRows,
    Result,
    RowStatistic,
    Statistics,
    WeightStatistic,
    WeightSums,
    finish_rows,
)


@dataclass(frozen=True, eq=False)
class Partial:
    """Statistics of `queries` x `keys`, which are positions in rising order, (q,) and (k,).

    `rows` is the result of the first sweep and `sums` that of the second; None without that sweep.
    An engine whose kernels accumulate statistics returns a `Partial` itself. Its state needs max,
    sum and the accumulators that the statistics name.
    """

    problem: Problem
    statistics: Statistics
    queries: Tensor
    keys: Tensor
    rows: State | None
    sums: WeightSums | None

    @classmethod
    def of_all(
        cls,
        problem: Problem,
        statistics: Statistics,
        rows: State | None,
        sums: WeightSums | None = None,
    ) -> "Partial":
        """Return a `Partial` of all queries and keys."""
        q, k = (torch.arange(size, device=problem.device) for size in (problem.Tq, problem.Tk))
        return cls(problem, statistics, q, k, rows, sums)

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp, (B, H, q), for the second step over key shards.

        Raises `BadValue` while keys are missing.
        """
        return self._finished().lse

    def merge(self, other: "Partial") -> "Partial":
        """Combine two parts.

        Raises `BadValue` unless both together cover all pairs of some queries and some keys, each
        pair once. Parts of the same pairs merge if one has the first sweep and the other the
        second. Otherwise the result has the sweeps that are in both parts.
        """
        if self.statistics != other.statistics:
            raise self._refused(other, "they hold different statistics")
        same_queries = torch.equal(self.queries, other.queries)
        same_keys = torch.equal(self.keys, other.keys)
        sweeps = [(p.rows is not None, p.sums is not None) for p in (self, other)]
        if same_queries and same_keys and sorted(sweeps) == [(False, True), (True, False)]:
            rows, sums = self.rows or other.rows, self.sums or other.sums
            return Partial(self.problem, self.statistics, self.queries, self.keys, rows, sums)
        if not any(a and b for a, b in zip(*sweeps, strict=True)):
            raise self._refused(other, "they have different sweeps")
        if same_queries and (joined := _disjoint(self.keys, other.keys)):
            return self._along_keys(other, *joined)
        if same_keys and (joined := _disjoint(self.queries, other.queries)):
            return self._along_queries(other, *joined)
        raise self._refused(other, "they overlap, or leave pairs uncovered")

    def finish(self) -> dict[str, Result]:
        """Return the statistics of the sweeps by name, in their order, with all dimensions.

        Statistics of rows need all keys. Sums are over the queries of this part. Raises `BadValue`
        while keys are missing.
        """
        results: dict[str, Result] = {}
        rows = None if self.rows is None else self._finished()
        for statistic in self.statistics:
            if isinstance(statistic, RowStatistic) and rows is not None:
                results[statistic.name] = statistic.finish(rows)
            if isinstance(statistic, WeightStatistic) and self.sums is not None:
                total = self.sums[statistic.name]
                results[statistic.name] = statistic.finish(total, self.problem.grid, self.queries)
        return results

    def __repr__(self) -> str:
        sweeps = [n for n, x in (("first", self.rows), ("second", self.sums)) if x is not None]
        return (
            f"partial of {len(self.queries)} of {self.problem.Tq} queries x {len(self.keys)} of "
            f"{self.problem.Tk} keys, {' and '.join(sweeps)} sweep, "
            f"of {', '.join(s.name for s in self.statistics) or 'nothing'}"
        )

    # ------------------------------------------------------------------------------------ inside

    def _finished(self) -> FinishedRows:
        if self.rows is None or len(self.keys) < self.problem.Tk:
            rule = "the sum of a row needs a first sweep over all keys."
            hint = "merge it with the partials of the other keys first."
            raise BadValue(f"finish got a {self!r}.", rule, hint)
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
        rule = "partials differ only in queries or in keys, without overlap, or only in the sweep."
        hint = "merge the key shards of each chunk of queries first, then the chunks."
        return BadValue(f"merge got a {self!r} and a {other!r}: {why}.", rule, hint)


def finished_lse(problem: Problem, lse: Tensor) -> dict[str, Result]:
    """Return the statistics of a call with `lse` alone, which engines compute with the output. A
    query without keys has gradient 0."""
    lse = lse.to(problem.wide)
    return {"lse": lse.masked_fill(lse == MASKED, MASKED)}


def _disjoint(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Sort all positions, and return them with their order in cat([a, b]); None if one repeats."""
    positions, order = torch.cat([a, b]).sort(stable=True)
    if bool((positions[1:] == positions[:-1]).any()):
        return None
    return positions, order
