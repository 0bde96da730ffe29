"""Statistics by the C++ core: those of rows in the forward sweep, sums of weights in a second one.

The core returns what `stats/state.py` describes, in units of its own (kernels/attention.h,
`RowStats` and `WeightSums`); here it becomes a `Partial`, which finishes and merges like any other.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...problem.online_softmax import anchor
from ...problem.problem import Inputs, Problem
from ...stats import Statistic
from ...stats.buffers import Buffers
from ...stats.partial import Partial
from ...stats.state import RowStats, finish_rows
from .extension import core, layout
from .operator import answer
from .pack import MASK, check, kernel_args, mask_numbers, matrix_view, pack, tensor_view, with_rows

(ROW_STATS,) = layout(
    "RowStats", "max sum moment n_top top_scores top_keys n_groups group_sums group_masks"
)
(WEIGHT_SUMS,) = layout("WeightSums", "max share received map_rows map_cols map exact_row exact")
LN2 = math.log(2.0)


def answer_and_lse(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
) -> tuple[Tensor, Partial]:
    """The output and the log-sum-exp alone, which the operator returns and differentiates. The
    logits of a query, and its sink, then count as one logit, the log-sum-exp itself."""
    out, lse = answer(p, inputs, True)
    assert lse is not None
    lse = lse.to(p.wide)
    top = lse.detach()
    rows = RowStats(top, torch.exp(lse - anchor(top)))
    return out, Partial(replace(p, sinks=None), statistics, *everything_of(p), rows, None)


def core_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], out: Tensor | None
) -> Partial:
    """The statistics of all queries on all keys. With `out`, an empty tensor, the same sweep writes
    the output into it; with None the values are not read."""
    return core_stats_and_max(p, inputs, statistics, out)[0]


def core_stats_and_max(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], out: Tensor | None
) -> tuple[Partial, Tensor]:
    """`core_stats`, and the largest logit of every query in float64 (`RowStats` rounds it)."""
    buffers = Buffers(p, statistics)
    q, k, v = (with_rows(x) for x in inputs)
    v = v if out is not None else v[..., :0]
    args = kernel_args(p)  # its tensors must outlive the calls

    kept = buffers.no_rows(p.Tq)
    groups = [mask_numbers(0, 0, r.lo, r.hi, r.bits) for r in buffers.groups]
    problem = pack(q, k, v, out, None, args)
    check(
        core.attend_with_stats(
            problem,
            ROW_STATS.pack(
                *tensor_view(kept.max), *tensor_view(kept.sum), *tensor_view(kept.moment),
                buffers.best, *matrix_view(kept.best), *matrix_view(kept.where),
                len(groups), *matrix_view(kept.masses), 0,
            ),
            b"".join(MASK.pack(*group) for group in groups),
        )
    )  # fmt: skip
    unit = core.logit_scale(problem)
    rows = RowStats(
        kept.max * unit,
        kept.sum,
        None if kept.moment is None else kept.moment * LN2,
        kept.masses,
        None if kept.best is None else kept.best.double() * unit,  # their differences are exact
        kept.where,
    )

    sums = None
    if buffers.weights:
        share = finish_rows(rows, p.sinks).share
        sums = buffers.no_sums(p.Tk)
        exact = buffers.exact or []
        row_of = torch.full((p.Tq,), -1, device="cpu")
        row_of[exact] = torch.arange(len(exact), device="cpu")
        check(
            core.sum_weights(
                problem,
                WEIGHT_SUMS.pack(
                    *tensor_view(kept.max), *tensor_view(share), *tensor_view(sums.received),
                    *(buffers.bins or (0, 0)), *matrix_view(sums.map),
                    row_of.data_ptr(), *matrix_view(sums.rows),
                ),
            )
        )  # fmt: skip
        if sums.rows is not None:  # a query that was requested twice is stored once
            sums = sums._replace(rows=sums.rows[:, :, row_of[exact]])
    return Partial(p, statistics, *everything_of(p), rows, sums), kept.max.double() * unit


def everything_of(p: Problem) -> tuple[Tensor, Tensor]:
    """The queries and keys that a partial of the core covers: all."""
    return torch.arange(p.Tq, device=p.device), torch.arange(p.Tk, device=p.device)
