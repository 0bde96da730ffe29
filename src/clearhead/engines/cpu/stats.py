"""Compute statistics by the C++ core: of rows in the forward sweep, sums of weights in a second
one.

The core returns the accumulators of `stats/`, in its own units (kernels/attention.h, `RowStats` and
`WeightSums`). They become a `Partial`, which is finished and merged like any other.
"""

import math

import torch
from torch import Tensor

from ...problem.online_softmax import Accumulator, State
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Statistic, exact_rows, mass, pooled
from ...stats.row_statistics import Moment
from ...stats.statistic import WeightSums, empty_rows, empty_sums, finish_rows
from ...stats.top_scores import TopScores
from ..operators import with_rows
from .extension import core, layout
from .pack import MASK, args_of, check, mask_numbers, matrix_view, pack, tensor_view

(ROW_STATS,) = layout(
    "RowStats", "max sum moment n_top top_scores top_keys n_groups group_sums group_masks"
)
(WEIGHT_SUMS,) = layout("WeightSums", "max share received map_rows map_cols map exact_row exact")
LN2 = math.log(2.0)


def core_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], out: Tensor | None
) -> Partial:
    """Compute the statistics of all queries over all keys. The same sweep writes the output into
    `out`; if that is None, the values are not read."""
    return core_stats_and_max(p, inputs, statistics, out)[0]


def core_stats_and_max(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], out: Tensor | None
) -> tuple[Partial, Tensor]:
    """Return `core_stats`, and the largest logit of every query in float64 (`State` rounds it)."""
    q, k, v = (with_rows(x) for x in inputs)
    v = v if out is not None else v[..., :0]
    args = args_of(p)  # its tensors must outlive the calls

    rows = empty_rows(p, statistics, p.Tq)
    (moment,), (group_sums,) = (rows.more.get(name, (None,)) for name in ("moment", "groups"))
    top_scores, top_keys = rows.more.get("top", (None, None))
    ranges = [r for s in statistics if isinstance(s, mass) for r in s.ranges(p)]
    groups = [mask_numbers(0, 0, r.lo, r.hi, r.bits) for r in ranges]
    problem = pack(q, k, v, out, None, args)
    check(
        core.attend_with_stats(
            problem,
            ROW_STATS.pack(
                *tensor_view(rows.max), *tensor_view(rows.sum), *tensor_view(moment),
                0 if top_keys is None else top_keys.shape[-1],
                *matrix_view(top_scores), *matrix_view(top_keys),
                len(groups), *matrix_view(group_sums), 0,
            ),
            b"".join(MASK.pack(*group) for group in groups),
        )
    )  # fmt: skip
    unit = core.logit_scale(problem)
    more = {name: _in_nats(x, unit) for name, x in rows.more.items()}
    state = State(rows.max * unit, rows.sum, more)
    sums = None
    if any(s.sweep == "second" for s in statistics):
        share = finish_rows(state, p.sinks).share
        sums = _sum_weights(p, statistics, problem, rows.max, share)
    part = Partial.of_all(p, statistics, state, sums)
    return part, rows.max.double() * unit


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
    bins = [(s.query_bins(p), s.key_bins(p)) for s in statistics if isinstance(s, pooled)] or [
        (0, 0)
    ]
    exact = [i for s in statistics if isinstance(s, exact_rows) for i in s.places(p.grid)]
    row_of = torch.full((p.Tq,), -1, device="cpu")
    row_of[exact] = torch.arange(len(exact), device="cpu")
    check(
        core.sum_weights(
            problem,
            WEIGHT_SUMS.pack(
                *tensor_view(top), *tensor_view(share), *tensor_view(sums.get("received")),
                *bins[0], *matrix_view(sums.get("pooled")),
                row_of.data_ptr(), *matrix_view(sums.get("exact_rows")),
            ),
        )
    )  # fmt: skip
    if "exact_rows" in sums:  # the core stores a query that is requested twice once
        sums["exact_rows"] = sums["exact_rows"][:, :, row_of[exact]]
    return sums
