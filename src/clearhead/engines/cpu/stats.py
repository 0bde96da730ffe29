"""Compute statistics by the C++ core: of rows in the forward sweep, sums of weights in a second
one.

The core returns the accumulators of `stats/`, in its own units (kernels/attention.h, `RowStats` and
`WeightSums`). They become a `Partial`, which is finished and merged like any other.
"""

import math
from itertools import chain

import torch
from torch import Tensor

from ...masks.key_group import KeyGroup
from ...problem.online_softmax import Accumulator, State, WeightedSum
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Statistic, exact_rows, pooled, topk
from ...stats.group_statistics import GroupStatistic
from ...stats.row_statistics import Moment
from ...stats.statistic import WeightSums, empty_rows, empty_sums, finish_rows, zeros
from ...stats.top_scores import TopScores
from ..operators import with_rows
from .extension import core, layout
from .pack import args_of, check, mask_numbers, matrix_view, pack, tensor_view

(ROW_STATS,) = layout(
    "RowStats", "max sum moment n_top top_offsets top_scores top_keys n_groups group_sums groups"
)
(GROUP,) = layout("Group", "mask factors query_ids key_ids")
(WEIGHT_SUMS,) = layout(
    "WeightSums", "max share received map_rows map_cols map map_factors exact_row exact"
)
LN2 = math.log(2.0)


def core_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], out: Tensor | None
) -> tuple[Partial, Tensor]:
    """Compute the statistics of all queries over all keys, and the largest logit of every query in
    float64, which `State` rounds. The same sweep writes the output into `out`; if that is None, the
    values are not read."""
    q, k, v = (with_rows(x) for x in inputs)
    v = v if out is not None else v[..., :0]
    args = args_of(p)  # its tensors must outlive the calls

    rows = empty_rows(p, statistics, p.Tq)
    (moment,) = rows.more.get("moment", (None,))
    top_scores, top_keys = rows.more.get("top", (None, None))
    problem = pack(q, k, v, out, None, args)
    unit = core.logit_scale(problem)
    offsets = next((_top_offsets(s, p, unit) for s in statistics if isinstance(s, topk)), None)
    groups, group_sums = list[tuple[KeyGroup, tuple[Tensor | None, ...]]](), None
    if grouped := [s for s in statistics if isinstance(s, GroupStatistic)]:
        for s in grouped:
            numbers = _numbers(s, p)
            groups += [(x, (numbers, *_ids(x, p))) for x in s.key_groups(p)]
        group_sums = zeros(p, p.Tq, len(groups))
        parts = group_sums.split([len(s.masks) for s in grouped], -1)
        sums_of = {s.accumulator: WeightedSum(x) for s, x in zip(grouped, parts, strict=True)}
        rows = rows._replace(more={**rows.more, **sums_of})
    check(
        core.attend_with_stats(
            problem,
            ROW_STATS.pack(
                *tensor_view(rows.max), *tensor_view(rows.sum), *tensor_view(moment),
                0 if top_keys is None else top_keys.shape[-1], *tensor_view(offsets),
                *matrix_view(top_scores), *matrix_view(top_keys),
                len(groups), *matrix_view(group_sums), 0,
            ),
            b"".join(
                GROUP.pack(*_packed(group), *chain.from_iterable(map(tensor_view, tensors)))
                for group, tensors in groups
            ),
        )
    )  # fmt: skip
    more = {name: _in_nats(x, unit) for name, x in rows.more.items()}
    state = State(rows.max * unit, rows.sum, more)
    sums = None
    if any(s.sweep == "second" for s in statistics):
        share = finish_rows(state, p.sinks).factor
        sums = _sum_weights(p, statistics, problem, rows.max, share)
    part = Partial.of_all(p, statistics, state, sums)
    return part, rows.max.double() * unit


def _ids(group: KeyGroup, p: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of queries, (B, H, Tq), and of keys, (B, H, Tk), that the core compares."""
    numbered = group.numbered_ids()
    if numbered is None:
        return None, None
    of_query, of_key = (x.unsqueeze(1).expand(p.B, p.H, -1) for x in numbered)
    return of_query, of_key


def _packed(group: KeyGroup) -> tuple[int, ...]:
    """Return the core's `Mask` of the rule of a group."""
    if group.band is not None:
        return mask_numbers(*group.band, None, None, None)
    return mask_numbers(0, 0, group.ranges.lo, group.ranges.hi, group.ranges.bits)


def _numbers(statistic: Statistic, p: Problem) -> Tensor | None:
    """Return the numbers by which a statistic multiplies weights, (B, H, Tk), for the core."""
    if statistic.factors is None:
        return None
    x = statistic.factors.of(p)
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def _top_offsets(statistic: topk, p: Problem, unit: float) -> Tensor | None:
    """Return offsets to add to the core's raw scores, so that it ranks by weight times number."""
    numbers = _numbers(statistic, p)
    return None if numbers is None else numbers.log() / unit


def _in_nats(x: Accumulator, unit: float) -> Accumulator:
    if isinstance(x, Moment):
        return Moment(x.total * LN2)
    if isinstance(x, TopScores):
        return TopScores(x.scores.double() * unit, x.keys)  # float64: exact differences
    return x


def _sum_weights(
    p: Problem, statistics: tuple[Statistic, ...], problem: bytes, top: Tensor, share: Tensor
) -> WeightSums:
    sums = empty_sums(p, statistics, slice(0, p.Tq), p.Tk)
    bins, factors = (0, 0), None
    for s in statistics:
        if isinstance(s, pooled):
            bins, factors = (s.query_bins(p), s.key_bins(p)), _numbers(s, p)
    exact = [i for s in statistics if isinstance(s, exact_rows) for i in s.positions(p.grid)]
    row_of = torch.full((p.Tq,), -1, device="cpu")
    row_of[exact] = torch.arange(len(exact), device="cpu")
    check(
        core.sum_weights(
            problem,
            WEIGHT_SUMS.pack(
                *tensor_view(top), *tensor_view(share), *tensor_view(sums.get("received")),
                *bins, *matrix_view(sums.get("pooled")), *tensor_view(factors),
                row_of.data_ptr(), *matrix_view(sums.get("exact_rows")),
            ),
        )
    )  # fmt: skip
    if "exact_rows" in sums:  # the core stores a query that is requested twice once
        sums["exact_rows"] = sums["exact_rows"][:, :, row_of[exact]]
    return sums
