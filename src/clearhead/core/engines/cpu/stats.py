"""Compute statistics by the C++ core, of rows and sums of weights, in the sweep of the output.

`core_results` returns finished statistics. `core_stats` returns the accumulators of `stats/` as a
`Partial`, which merges with others and has gradients. Both call `attend_with_stats` of the core
(kernels/bind.cpp).
"""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...masks.key_group import GroupMask
from ...problem.online_softmax import Accumulator, State, WeightedSum
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Result, Statistic, Statistics, exact_rows, pooled, topk
from ...stats.group_statistics import GroupStatistic
from ...stats.per_key import PerKey
from ...stats.row_statistics import Effective, Entropy, Moment
from ...stats.statistic import TopWeights, WeightStatistic
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
    """The sums of weights that the core adds to; None if one is not needed."""

    received: Tensor | None = None
    map_rows: int = 0
    map_cols: int = 0
    map: Tensor | None = None
    map_factors: Tensor | None = None
    exact_row: Tensor | None = None
    exact: Tensor | None = None


class RowStats(NamedTuple):
    """The statistics of rows that the core computes, (B, H, Tq); None if not requested. The first
    three are accumulators in the core's units, the others are finished."""

    max: Tensor | None
    sum: Tensor | None
    moment: Tensor | None
    largest: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


class Computed(NamedTuple):
    """What `attend_with_stats` of the core returns; None and an empty list if not requested."""

    code: int
    out: Tensor | None
    rows: list[Tensor | None]  # those of `RowStats`
    top_scores: Tensor | None
    top_keys: Tensor | None
    group_sums: list[Tensor]  # of each group of all statistics, (B, H, Tq)


for arguments in (GroupMask, Groups, Sums, RowStats, Computed):
    must_have_fields(arguments)

# The members of `RowStats` from which finished statistics and accumulators follow.
MAX, SUM, MOMENT, LARGEST, LSE, ENTROPY = range(6)
FINISHED = {"lse": LSE, "max": LARGEST, "entropy": ENTROPY, "effective": ENTROPY}
ACCUMULATED = {"lse": SUM, "max": MAX, "entropy": MOMENT, "effective": MOMENT}

# The member of `Sums` to which each statistic of weights is added.
SUMS = {"received": "received", "pooled": "map", "exact_rows": "exact"}


def core_results(
    p: Problem, tensors: Inputs, args: KernelArgs, statistics: Statistics, output: bool
) -> tuple[Tensor | None, dict[str, Result]]:
    """Compute statistics of all queries over all keys, without gradients, and in the same sweep the
    output; without it, `tensors` need no values (`readable`)."""
    computed, sums = _compute(p, tensors, args, statistics, output=output, finished=True)
    group_sums = iter(computed.group_sums)
    results: dict[str, Result] = {}
    for s in statistics:
        if s.name in FINISHED:
            row = cast(Tensor, computed.rows[FINISHED[s.name]])
            results[s.name] = cast(Effective, s).of_entropy(row) if s.name == "effective" else row
        elif s.name == "topk":
            top = cast(Tensor, computed.top_scores), cast(Tensor, computed.top_keys)
            results[s.name] = TopWeights(*top)
        elif s.sweep == "first":
            of_groups = cast(GroupStatistic, s)
            results[s.name] = of_groups.of_sums([next(group_sums) for _ in of_groups.masks])
        else:
            total = _sum_of(s, p, cast(Sums, sums))
            results[s.name] = cast(WeightStatistic, s).finish(total, p.grid, None)
    return computed.out, results


def _compute(
    p: Problem, tensors: Inputs, args: KernelArgs, statistics: Statistics, *, output: bool,
    finished: bool,
) -> tuple[Computed, Sums | None]:  # fmt: skip
    """Call the core for `finished` statistics, or for accumulators, and their sums of weights.

    Statistics are distinguished by name, because `isinstance` of an abstract class takes 0.25 us.
    """
    row_of, rows = (FINISHED, 0) if finished else (ACCUMULATED, 1 << MAX | 1 << SUM)
    n, offsets, groups, sums = -1, None, [], None
    for s in statistics:
        if s.name in row_of:
            rows |= 1 << row_of[s.name]
        elif s.name == "topk":
            n = min(cast(topk, s).n, p.Tk)
            if (numbers := _numbers(s, p)) is not None:
                # Added to the core's raw scores, they rank keys by weight times number.
                offsets = numbers.log() / core.logit_scale(*tensors, args)
        elif s.sweep == "first":
            of_groups = cast(GroupStatistic, s)
            of_weights = finished and of_groups.of_weights
            groups.append(Groups(of_groups.masks_for_core(p), _numbers(s, p), of_weights))
        elif sums is None:
            sums = _empty_sums(p, statistics)
    computed = Computed(
        *core.attend_with_stats(*tensors, output, args, rows, n, offsets, finished, groups, sums)
    )
    check(computed.code)
    return computed, sums


def core_stats(p: Problem, inputs: Inputs, statistics: Statistics) -> tuple[Partial, Tensor]:
    """Compute the statistics of all queries over all keys, as accumulators that merge, and the
    largest logit of every query in float64, which `State` rounds."""
    tensors, args = readable(inputs, False), args_of(p)
    unit = core.logit_scale(*tensors, args)
    computed, into = _compute(p, tensors, args, statistics, output=False, finished=False)
    top, total, moment = cast(list[Tensor], computed.rows[:3])
    group_sums = iter(computed.group_sums)
    more: dict[str, Accumulator] = {}
    for s in statistics:
        if isinstance(s, Entropy):
            more[s.accumulator] = Moment(moment * LN2)
        elif isinstance(s, topk):  # float64: exact differences
            scores, keys = cast(Tensor, computed.top_scores), cast(Tensor, computed.top_keys)
            more[s.accumulator] = TopScores(scores.double() * unit, keys)
        elif isinstance(s, GroupStatistic):
            of_groups = torch.stack([next(group_sums) for _ in s.masks], -1)
            more[s.accumulator] = WeightedSum(of_groups)
    sums = None
    if into is not None:
        sums = {s.name: _sum_of(s, p, into) for s in statistics if s.sweep == "second"}
    state = State(top * unit, total, more)
    return Partial.of_all(p, statistics, state, sums), top.double() * unit


def readable(inputs: Inputs, output: bool) -> Inputs:
    """Return the tensors that the core reads: no values without the output."""
    q, k, v = map(with_rows, inputs)
    return Inputs(q, k, v if output else v[..., :0])


def _numbers(statistic: Statistic, p: Problem) -> Tensor | None:
    """Return the numbers by which a statistic multiplies weights, (B, H, Tk), for the core."""
    if (factors := statistic.by) is None:
        return None
    x = cast(PerKey, factors).of(p)
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def _empty_sums(p: Problem, statistics: Statistics) -> Sums:
    """Return sums of 0 for the statistics that add weights."""
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
    """Return the sums of a statistic that adds weights."""
    total: Tensor = getattr(sums, SUMS[s.name])
    if sums.exact_row is None or not isinstance(s, exact_rows):
        return total
    return total[:, :, sums.exact_row[s.positions(p.grid)]]  # a query may be requested twice
