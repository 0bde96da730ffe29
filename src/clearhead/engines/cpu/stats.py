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
    FinishedRows,
    RowStatistic,
    WeightStatistic,
    WeightSums,
    empty_rows,
    empty_sums,
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
    """A group of keys: a band or ranges, the numbers that multiply weights, (B, H, Tk), and ids of
    queries and keys, which must be equal."""

    before: int
    after: int
    lo: Tensor | None
    hi: Tensor | None
    bits: Tensor | None
    factors: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None


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
    received: Tensor | None
    map_rows: int
    map_cols: int
    map: Tensor | None
    map_factors: Tensor | None
    exact_row: Tensor | None
    exact: Tensor | None


for arguments in (RowStats, Group, Sums):
    must_have_fields(arguments)


# The members of `RowStats`, (B, H, Tq), from which each statistic follows.
NEEDS = {
    "lse": ["lse"], "max": ["largest"], "entropy": ["entropy"], "effective": ["entropy"],
    "topk": [], "mass": ["share"], "weighted": ["share"], "value_weighted": ["share"],
    "received": ["max", "share"], "pooled": ["max", "share"], "exact_rows": ["max", "share"],
}  # fmt: skip


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
            groups = _groups(p, statistics)
            sums = new(B, H, Tq, len(groups), dtype=torch.float32)
            wanted |= {"groups": groups, "group_sums": sums}
    rows = RowStats(**wanted, top_weights=True)
    check(core.attend_with_stats(*tensors, out, args, rows))
    weight_sums = None
    if rows.max is not None and rows.share is not None:
        weight_sums = _sum_weights(p, statistics, tensors, args, rows.max, rows.share)
    return {s.name: _finished(s, p, rows, statistics, weight_sums) for s in statistics}


def _finished(
    s: Statistic,
    p: Problem,
    rows: RowStats,
    statistics: tuple[Statistic, ...],
    weight_sums: WeightSums | None,
) -> Result:
    if s.sweep == "second":
        assert isinstance(s, WeightStatistic) and weight_sums is not None
        return s.finish(weight_sums[s.name], p.grid, None)
    if s.name == "topk":
        return cast(topk, s).padded(cast(Tensor, rows.top_scores), cast(Tensor, rows.top_keys))
    if rows.entropy is not None and s.name in ("entropy", "effective"):
        return cast(Entropy, s).of_entropy(rows.entropy)
    # The other statistics read one of these.
    state = State(rows.largest, rows.share, _group_sums(rows.group_sums, statistics))  # type: ignore[arg-type]  # None if none reads it
    return cast(RowStatistic, s).finish(FinishedRows(state, rows.lse, rows.share))  # type: ignore[arg-type]  # as above


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
    groups = _groups(p, statistics)
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
        )
    )
    more = {**rows.more, **_group_sums(group_sums, statistics)}
    state = State(rows.max * unit, rows.sum, {n: _in_nats(x, unit) for n, x in more.items()})
    sums = None
    if any(s.sweep == "second" for s in statistics):
        share = finish_rows(state, p.sinks).factor
        sums = _sum_weights(p, statistics, tensors, args, rows.max, share)
    return Partial.of_all(p, statistics, state, sums), rows.max.double() * unit


def readable(inputs: Inputs, output: bool) -> Inputs:
    """Return the tensors that the core reads: no values without the output."""
    q, k, v = map(with_rows, inputs)
    return Inputs(q, k, v if output else v[..., :0])


def _groups(p: Problem, statistics: tuple[Statistic, ...]) -> list[Group]:
    groups = []
    for s in statistics:
        if isinstance(s, GroupStatistic):
            numbers = _numbers(s, p)
            for x in s.key_groups(p):
                if x.band is not None:
                    rule: MaskArgs = (*x.band, None, None, None)
                else:
                    rule = (0, 0, x.ranges.lo, x.ranges.hi, x.ranges.bits)
                groups.append(Group(*rule, numbers, *x.numbered_ids))
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


def _sum_weights(
    p: Problem,
    statistics: tuple[Statistic, ...],
    tensors: Inputs,
    args: KernelArgs,
    top: Tensor,
    share: Tensor,
) -> WeightSums:
    sums = empty_sums(p, statistics, slice(0, p.Tq), p.Tk)
    bins, factors = (0, 0), None
    for s in statistics:
        if isinstance(s, pooled):
            bins, factors = (s.query_bins(p), s.key_bins(p)), _numbers(s, p)
    exact, row_of = (
        [i for s in statistics if isinstance(s, exact_rows) for i in s.positions(p.grid)],
        None,
    )
    if exact:
        row_of = torch.full((p.Tq,), -1, device="cpu")
        row_of[exact] = torch.arange(len(exact), device="cpu")
    of = Sums(
        top, share, sums.get("received"), *bins, sums.get("pooled"), factors, row_of,
        sums.get("exact_rows"),
    )  # fmt: skip
    check(core.sum_weights(*tensors, args, of))
    if row_of is not None:  # the core stores a query that is requested twice once
        sums["exact_rows"] = sums["exact_rows"][:, :, row_of[exact]]
    return sums
