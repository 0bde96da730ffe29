"""Compute statistics by the C++ core: of rows in the forward sweep, sums of weights in a second
one.

`core_results` returns finished statistics. `core_stats` returns the accumulators of `stats/` as a
`Partial`, which merges with others and has gradients. Both call `attend_with_stats` of the core
(kernels/bind.cpp).
"""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...masks.key_group import GroupMask
from ...problem.online_softmax import Accumulator, State, WeightedSum
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Result, Statistic, exact_rows, map_tensors, pooled, topk
from ...stats.group_statistics import GroupStatistic
from ...stats.per_key import PerKey
from ...stats.row_statistics import Effective, Entropy, Moment
from ...stats.statistic import WeightStatistic, finish_rows
from ...stats.top_scores import TopScores
from ..operators import KernelArgs, with_rows
from .call import args_of, check
from .extension import core, must_have_fields

LN2 = math.log(2.0)


class Groups(NamedTuple):
    """The groups of keys of a statistic: their masks (`GroupMask`), the numbers that multiply
    weights, (B, H, Tk), and whether the sums are of weights, and not of 2^y."""

    masks: list[GroupMask]
    factors: Tensor | None
    of_weights: bool


class Sums(NamedTuple):
    """The sums of weights that the core adds to; None if one is not needed. `attend_with_stats`
    computes `max` and `share` itself."""

    max: Tensor | None = None
    share: Tensor | None = None
    received: Tensor | None = None
    map_rows: int = 0
    map_cols: int = 0
    map: Tensor | None = None
    map_factors: Tensor | None = None
    exact_row: Tensor | None = None
    exact: Tensor | None = None


for arguments in (GroupMask, Groups, Sums):
    must_have_fields(arguments)

# The statistics of rows that the core computes, (B, H, Tq), as bits of a number. `max`, `sum` and
# `moment` are accumulators in the core's units; the others are finished.
ROWS = core.fields()["RowStats"].split() if core else []
BITS = {name: 1 << i for i, name in enumerate(ROWS)}
NEEDS = {"lse": "lse", "max": "largest", "entropy": "entropy", "effective": "entropy"}

# The member of `Sums` to which each statistic of the second sweep is added.
SUMS = {"received": "received", "pooled": "map", "exact_rows": "exact"}


class CoreResults(NamedTuple):
    """What the core computed: the output, and the numbers of statistics (`attend_with_stats`)."""

    problem: Problem
    statistics: tuple[Statistic, ...]
    requested: int  # the bits of `rows`
    summed: dict[str, Result]  # the statistics of the second sweep, finished
    inference: bool  # was the call in inference mode?
    out: Tensor | None
    rows: Tensor | None
    top_weights: Tensor | None
    top_keys: Tensor | None
    group_sums: Tensor | None

    def finish(self) -> dict[str, Result]:
        """Return the statistics by name, which follow from the tensors of the core alone."""
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_inference_mode_enabled() is not self.inference:
            with torch.inference_mode(self.inference):
                return self.finish()
        rows: Sequence[Tensor] = ()
        if self.rows is not None:
            rows = self.rows.unbind() if self.rows.dim() == 4 else [self.rows]
        # Not as views of one tensor, whose changes in place autograd counts or refuses together.
        own = attrgetter("data")
        return {s.name: map_tensors(self._finished(s, rows), own) for s in self.statistics}

    def _finished(self, s: Statistic, rows: Sequence[Tensor]) -> Result:
        if s.name in NEEDS:
            row = rows[(self.requested & (BITS[NEEDS[s.name]] - 1)).bit_count()]
            return cast(Effective, s).of_entropy(row) if s.name == "effective" else row
        if isinstance(s, topk):
            return s.padded(cast(Tensor, self.top_weights), cast(Tensor, self.top_keys))
        if isinstance(s, GroupStatistic):
            sums = _sums_by_statistic(cast(Tensor, self.group_sums), self.statistics)
            return s.of_sums(sums[s.name])
        return self.summed[s.name]


def core_results(
    p: Problem,
    tensors: Inputs,
    args: KernelArgs,
    statistics: tuple[Statistic, ...],
    output: bool,
) -> CoreResults:
    """Compute statistics of all queries over all keys, without gradients, and in the same sweep the
    output; without it, `tensors` need no values (`readable`)."""
    requested, n, offsets, groups, sums = 0, -1, None, [], None
    for s in statistics:
        if s.name in NEEDS:
            requested |= BITS[NEEDS[s.name]]
        elif s.sweep == "second":
            sums = sums or _empty_sums(p, statistics)
        elif isinstance(s, topk):
            n, offsets = min(s.n, p.Tk), _top_offsets(s, p, tensors, args)
        else:
            groups.append(_groups(cast(GroupStatistic, s), p, finished=True))
    code, *computed = core.attend_with_stats(
        *tensors, output, args, requested, n, offsets, True, groups, sums
    )
    check(code)
    summed = {}
    if sums is not None:  # finished now, because a caller may change the numbers `by` in place
        second = (s for s in statistics if isinstance(s, WeightStatistic))
        summed = {s.name: s.finish(_sum_of(s, p, sums), p.grid, None) for s in second}
    inference = torch.is_inference_mode_enabled()
    return CoreResults(p, statistics, requested, summed, inference, *computed)


def core_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
) -> tuple[Partial, Tensor]:
    """Compute the statistics of all queries over all keys, as accumulators that merge, and the
    largest logit of every query in float64, which `State` rounds."""
    tensors, args = readable(inputs, False), args_of(p)
    unit = core.logit_scale(*tensors, args)
    tops = next((s for s in statistics if isinstance(s, topk)), None)
    n, offsets = -1, None
    if tops is not None:
        n, offsets = min(tops.n, p.Tk), _top_offsets(tops, p, tensors, args)
    groups = [_groups(s, p, finished=False) for s in statistics if isinstance(s, GroupStatistic)]
    names = ["max", "sum"]
    if any(isinstance(s, Entropy) for s in statistics):
        names.append("moment")
    code, _, rows, top_scores, top_keys, group_sums = core.attend_with_stats(
        *tensors, False, args, sum(BITS[name] for name in names), n, offsets, False, groups, None
    )
    check(code)
    top, total = rows[0], rows[1]
    more: dict[str, Accumulator] = {}
    for s in statistics:
        if isinstance(s, Entropy):
            more[s.accumulator] = Moment(rows[2] * LN2)
        elif isinstance(s, topk):  # float64: exact differences
            more[s.accumulator] = TopScores(top_scores.double() * unit, top_keys)
        elif isinstance(s, GroupStatistic):
            more[s.accumulator] = WeightedSum(_sums_by_statistic(group_sums, statistics)[s.name])
    state = State(top * unit, total, more)
    sums = None
    if second := [s for s in statistics if s.sweep == "second"]:
        into = _empty_sums(p, statistics)._replace(
            max=top, share=finish_rows(state, p.sinks).factor
        )
        check(core.sum_weights(*tensors, args, into))
        sums = {s.name: _sum_of(s, p, into) for s in second}
    return Partial.of_all(p, statistics, state, sums), top.double() * unit


def readable(inputs: Inputs, output: bool) -> Inputs:
    """Return the tensors that the core reads: no values without the output."""
    q, k, v = map(with_rows, inputs)
    return Inputs(q, k, v if output else v[..., :0])


def _groups(s: GroupStatistic, p: Problem, *, finished: bool) -> Groups:
    """Return the groups of a statistic; sums are of weights if a `finished` statistic is."""
    return Groups(s.masks_for_core(p), _numbers(s, p), finished and s.of_weights)


def _sums_by_statistic(sums: Tensor, statistics: tuple[Statistic, ...]) -> dict[str, Tensor]:
    """Split the sums over the groups of all statistics, (B, H, Tq, groups)."""
    grouped = [s for s in statistics if isinstance(s, GroupStatistic)]
    parts = [sums] if len(grouped) == 1 else sums.split([len(s.masks) for s in grouped], -1)
    return {s.name: part for s, part in zip(grouped, parts, strict=True)}


def _numbers(statistic: Statistic, p: Problem) -> Tensor | None:
    """Return the numbers by which a statistic multiplies weights, (B, H, Tk), for the core."""
    if (factors := statistic.by) is None:
        return None
    x = cast(PerKey, factors).of(p)
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def _top_offsets(statistic: topk, p: Problem, tensors: Inputs, args: KernelArgs) -> Tensor | None:
    """Return offsets to add to the core's raw scores, so that it ranks by weight times number."""
    if (numbers := _numbers(statistic, p)) is None:
        return None
    return numbers.log() / core.logit_scale(*tensors, args)


def _empty_sums(p: Problem, statistics: tuple[Statistic, ...]) -> Sums:
    """Return sums of 0 for the statistics of the second sweep."""
    into: dict[str, Any] = {}
    for s in statistics:
        if s.sweep == "second":
            into[SUMS[s.name]] = cast(WeightStatistic, s).empty(p, slice(0, p.Tq), p.Tk)
        if s.name == "pooled":
            bins = cast(pooled, s)
            into |= {"map_rows": bins.query_bins(p), "map_cols": bins.key_bins(p)}
            into["map_factors"] = _numbers(s, p)
        if s.name == "exact_rows" and (positions := cast(exact_rows, s).positions(p.grid)):
            row_of = torch.full((p.Tq,), -1, device="cpu")
            row_of[positions] = torch.arange(len(positions), device="cpu")
            into["exact_row"] = row_of
    return Sums(**into)


def _sum_of(s: Statistic, p: Problem, sums: Sums) -> Tensor:
    """Return the sums of a statistic of the second sweep."""
    total: Tensor = getattr(sums, SUMS[s.name])
    if sums.exact_row is None or not isinstance(s, exact_rows):
        return total
    return total[:, :, sums.exact_row[s.positions(p.grid)]]  # a query may be requested twice
