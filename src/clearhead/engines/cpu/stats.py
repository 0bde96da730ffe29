"""Compute statistics by the C++ core: of rows in the forward sweep, sums of weights in a second
one.

`core_results` returns finished statistics. `core_stats` returns the accumulators of `stats/` as a
`Partial`, which merges with others and has gradients. Both call the core with `RowStats` and
`WeightSums` (kernels/attention.h).
"""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...problem.online_softmax import Accumulator, State, WeightedSum
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Result, Statistic, exact_rows, pooled, topk
from ...stats.group_statistics import GroupStatistic
from ...stats.row_statistics import Entropy, Moment
from ...stats.statistic import (
    WeightStatistic,
    empty_rows,
    finish_rows,
    zeros,
)
from ...stats.top_scores import TopScores
from ..operators import KernelArgs, MaskArgs, with_rows
from .call import args_of, check
from .extension import core, must_have_fields

LN2 = math.log(2.0)
GROUPED = {"mass", "weighted", "value_weighted"}


class Group(NamedTuple):
    """A group of keys: a band or ranges, ids of queries and keys, which must be equal, the numbers
    that multiply weights, (B, H, Tk), and whether the sums are of weights, and not of 2^y."""

    before: int
    after: int
    lo: Tensor | None
    hi: Tensor | None
    bits: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    factors: Tensor | None
    of_weights: bool


class RowStats(NamedTuple):
    """What the core writes for every query; None if it is not needed. `max`, `sum`, `moment` and
    scores are accumulators in the core's units; the others are finished."""

    max: Tensor | None = None
    sum: Tensor | None = None
    moment: Tensor | None = None
    largest: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    share: Tensor | None = None
    top_offsets: Tensor | None = None
    top_scores: Tensor | None = None
    top_keys: Tensor | None = None
    group_sums: Tensor | None = None
    groups: list[Group] = []  # noqa: RUF012 (never changed)
    top_weights: bool = False


class Sums(NamedTuple):
    """The sums of weights that the core adds to; None if one is not needed."""

    max: Tensor
    share: Tensor
    received: Tensor | None = None
    map_rows: int = 0
    map_cols: int = 0
    map: Tensor | None = None
    map_factors: Tensor | None = None
    exact_row: Tensor | None = None
    exact: Tensor | None = None


for arguments in (RowStats, Group, Sums):
    must_have_fields(arguments)


# The members of `RowStats`, (B, H, Tq), from which each statistic follows.
NEEDS = {
    "lse": ["lse"], "max": ["largest"], "entropy": ["entropy"], "effective": ["entropy"],
    "topk": [], "mass": [], "weighted": [], "value_weighted": [],
    "received": ["max", "share"], "pooled": ["max", "share"], "exact_rows": ["max", "share"],
}  # fmt: skip

# The member of `Sums` to which each statistic of the second sweep is added.
SUMS = {"received": "received", "pooled": "map", "exact_rows": "exact"}


def core_results(
    p: Problem,
    tensors: Inputs,
    args: KernelArgs,
    statistics: tuple[Statistic, ...],
    out: Tensor | None,
) -> dict[str, Result]:
    """Compute finished statistics of all queries over all keys, without gradients. The same sweep
    writes the output into `out`; if that is None, `tensors` need no values (`readable`)."""
    new, B, H, Tq = tensors.q.new_empty, p.B, p.H, p.Tq
    wanted: dict[str, Any] = {}
    for s in statistics:
        for name in NEEDS[s.name]:
            if name not in wanted:
                wanted[name] = new(B, H, Tq, dtype=torch.float32)
        if s.name == "topk":
            tops = cast(topk, s)
            size = (B, H, Tq, min(tops.n, p.Tk))
            scores, keys = new(size, dtype=torch.float32), new(size, dtype=torch.long)
            offsets = None if s.by is None else _top_offsets(tops, p, tensors, args)
            wanted |= {"top_offsets": offsets, "top_scores": scores, "top_keys": keys}
        elif s.name in GROUPED and "groups" not in wanted:
            groups = _groups(p, statistics, finished=True)
            group_sums = new(B, H, Tq, len(groups), dtype=torch.float32)
            wanted |= {"groups": groups, "group_sums": group_sums}
    rows = RowStats(**wanted, top_weights=True)
    sums = None
    if rows.max is not None and rows.share is not None:
        sums = _empty_sums(p, statistics, rows.max, rows.share)
    check(core.attend_with_stats(*tensors, out, args, rows, sums))
    return {s.name: _finished(s, p, statistics, rows, sums) for s in statistics}


def _finished(
    s: Statistic, p: Problem, statistics: tuple[Statistic, ...], rows: RowStats, sums: Sums | None
) -> Result:
    if s.sweep == "second":
        return cast(WeightStatistic, s).finish(_sum_of(s, p, cast(Sums, sums)), p.grid, None)
    if s.name == "topk":
        return cast(topk, s).padded(cast(Tensor, rows.top_scores), cast(Tensor, rows.top_keys))
    if s.name in GROUPED:
        (total,) = _group_sums(rows.group_sums, statistics)[cast(GroupStatistic, s).accumulator]
        return cast(GroupStatistic, s).of_sums(total)
    if s.name in ("entropy", "effective"):
        return cast(Entropy, s).of_entropy(cast(Tensor, rows.entropy))
    return cast(Tensor, rows.lse if s.name == "lse" else rows.largest)


def core_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
) -> tuple[Partial, Tensor]:
    """Compute the statistics of all queries over all keys, as accumulators that merge, and the
    largest logit of every query in float64, which `State` rounds."""
    tensors, args = readable(inputs, False), args_of(p)
    unit = core.logit_scale(*tensors, args)
    rows = empty_rows(p, statistics, p.Tq)
    (moment,) = rows.more.get("moment", (None,))
    top_scores, top_keys = rows.more.get("top", (None, None))
    tops = next((s for s in statistics if isinstance(s, topk)), None)
    groups = _groups(p, statistics, finished=False)
    group_sums = zeros(p, p.Tq, len(groups)) if groups else None
    check(
        core.attend_with_stats(
            *tensors,
            None,
            args,
            RowStats(
                max=rows.max,
                sum=rows.sum,
                moment=moment,
                top_offsets=None if tops is None else _top_offsets(tops, p, tensors, args),
                top_scores=top_scores,
                top_keys=top_keys,
                group_sums=group_sums,
                groups=groups,
            ),
            None,
        )
    )
    more = {**rows.more, **_group_sums(group_sums, statistics)}
    state = State(rows.max * unit, rows.sum, {n: _in_nats(x, unit) for n, x in more.items()})
    sums = None
    if second := [s for s in statistics if s.sweep == "second"]:
        into = _empty_sums(p, statistics, rows.max, finish_rows(state, p.sinks).factor)
        check(core.sum_weights(*tensors, args, into))
        sums = {s.name: _sum_of(s, p, into) for s in second}
    return Partial.of_all(p, statistics, state, sums), rows.max.double() * unit


def readable(inputs: Inputs, output: bool) -> Inputs:
    """Return the tensors that the core reads: no values without the output."""
    q, k, v = map(with_rows, inputs)
    return Inputs(q, k, v if output else v[..., :0])


def _groups(p: Problem, statistics: tuple[Statistic, ...], *, finished: bool) -> list[Group]:
    """Return the groups of all statistics; sums are of weights if a `finished` statistic is."""
    groups = []
    for s in statistics:
        if isinstance(s, GroupStatistic):
            numbers, of_weights = _numbers(s, p), finished and s.of_weights
            for x in s.key_groups(p):
                if x.band is not None:
                    rule: MaskArgs = (*x.band, None, None, None)
                else:
                    rule = (0, 0, x.ranges.lo, x.ranges.hi, x.ranges.bits)
                groups.append(Group(*rule, *x.numbered_ids, numbers, of_weights))
    return groups


def _group_sums(sums: Tensor | None, statistics: tuple[Statistic, ...]) -> dict[str, Accumulator]:
    """Return the sums of each statistic over its groups, by its accumulator."""
    if sums is None:
        return {}
    grouped = [s for s in statistics if isinstance(s, GroupStatistic)]
    parts = [sums] if len(grouped) == 1 else sums.split([len(s.masks) for s in grouped], -1)
    return {s.accumulator: WeightedSum(x) for s, x in zip(grouped, parts, strict=True)}


def _numbers(statistic: Statistic, p: Problem) -> Tensor | None:
    """Return the numbers by which a statistic multiplies weights, (B, H, Tk), for the core."""
    if statistic.factors is None:
        return None
    x = statistic.factors.of(p)
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def _top_offsets(statistic: topk, p: Problem, tensors: Inputs, args: KernelArgs) -> Tensor | None:
    """Return offsets to add to the core's raw scores, so that it ranks by weight times number."""
    numbers = _numbers(statistic, p)
    return None if numbers is None else numbers.log() / core.logit_scale(*tensors, args)


def _in_nats(x: Accumulator, unit: float) -> Accumulator:
    if isinstance(x, Moment):
        return Moment(x.total * LN2)
    if isinstance(x, TopScores):
        return TopScores(x.scores.double() * unit, x.keys)  # float64: exact differences
    return x


def _empty_sums(p: Problem, statistics: tuple[Statistic, ...], top: Tensor, share: Tensor) -> Sums:
    """Return sums of 0 for the statistics of the second sweep."""
    into: dict[str, Any] = {}
    for s in statistics:
        if isinstance(s, WeightStatistic):
            into[SUMS[s.name]] = s.empty(p, slice(0, p.Tq), p.Tk)
        if isinstance(s, pooled):
            into |= {"map_rows": s.query_bins(p), "map_cols": s.key_bins(p)}
            into["map_factors"] = _numbers(s, p)
        if isinstance(s, exact_rows) and (positions := s.positions(p.grid)):
            row_of = torch.full((p.Tq,), -1, device="cpu")
            row_of[positions] = torch.arange(len(positions), device="cpu")
            into["exact_row"] = row_of
    return Sums(top, share, **into)


def _sum_of(s: Statistic, p: Problem, sums: Sums) -> Tensor:
    """Return the sums of a statistic of the second sweep."""
    total: Tensor = getattr(sums, SUMS[s.name])
    if sums.exact_row is None or not isinstance(s, exact_rows):
        return total
    return total[:, :, sums.exact_row[s.positions(p.grid)]]  # a query may be requested twice
