"""Statistics by the C++ core: the rows' in the sweep that answers, sums of weights in a second.

The core leaves what `stats/state.py` describes, in units of its own (kernels/attention.h, `Survey`
and `Tally`); here it becomes a `Partial`, which finishes and merges like any other.
"""

import math
import struct
from dataclasses import replace

import torch
from torch import Tensor

from ...problem.online_softmax import anchor
from ...problem.problem import Inputs, Problem
from ...stats import Statistic
from ...stats.buffers import Buffers
from ...stats.partial import Partial
from ...stats.state import Rows, finish_rows
from .extension import core
from .operator import answer
from .pack import check, grid, pack, place, question, rows_of

SURVEY = struct.Struct("=" + 3 * "4q" + "q" + 2 * "5q" + "q" + "5q" + "q")
TALLY = struct.Struct("=" + 3 * "4q" + "2q" + "5q" + "q" + "5q")
MASK = struct.Struct("=3q" + 3 * "5q")
LN2 = math.log(2.0)


def answer_and_lse(
    p: Problem, inputs: Inputs, wanted: tuple[Statistic, ...]
) -> tuple[Tensor, Partial]:
    """The output and the log-sum-exp alone, which comes with the answer and has a gradient. The
    logits of a query, and its sink, then count as one logit, the log-sum-exp itself."""
    out, lse = answer(p, inputs, True)
    assert lse is not None
    lse = lse.to(p.wide)
    top = lse.detach()
    rows = Rows(top, torch.exp(lse - anchor(top)))
    return out, Partial(replace(p, sinks=None), wanted, *everything_of(p), rows, None)


def survey(
    p: Problem, inputs: Inputs, wanted: tuple[Statistic, ...], out: Tensor | None
) -> Partial:
    """The statistics of all queries on all keys. With `out`, an empty tensor, the same sweep
    answers into it; with None the values are not read."""
    return survey_and_top(p, inputs, wanted, out)[0]


def survey_and_top(
    p: Problem, inputs: Inputs, wanted: tuple[Statistic, ...], out: Tensor | None
) -> tuple[Partial, Tensor]:
    """`survey`, and the largest logit of every query as the core knows it, in float64; `Rows` has
    it rounded."""
    needs = Buffers(p, wanted)
    q, k, v = (rows_of(x) for x in inputs)
    v = v if out is not None else v[..., :0]
    asked = question(p)

    kept = needs.no_rows(p.Tq)
    groups = [(ranges.lo, ranges.hi, ranges.bits) for ranges in needs.groups]
    packed = pack(q, k, v, out, None, asked)
    check(
        core.survey(
            packed,
            SURVEY.pack(
                *place(kept.max), *place(kept.sum), *place(kept.moment),
                needs.best, *grid(kept.best), *grid(kept.where),
                len(groups), *grid(kept.masses), 0,
            ),
            b"".join(
                MASK.pack(0, 0, lo.shape[-1], *grid(lo), *grid(hi), *grid(bits))
                for lo, hi, bits in groups
            ),
        )
    )  # fmt: skip
    unit = core.unit(packed)
    rows = Rows(
        kept.max * unit,
        kept.sum,
        None if kept.moment is None else kept.moment * LN2,
        kept.masses,
        None if kept.best is None else kept.best.double() * unit,  # their differences are exact
        kept.where,
    )

    sums = None
    if needs.weights:
        share = finish_rows(rows, p.sinks).share
        sums = needs.no_sums(p.Tk)
        slot = torch.full((p.Tq,), -1, device="cpu")
        slot[needs.exact or []] = torch.arange(len(needs.exact or []), device="cpu")
        check(
            core.tally(
                packed,
                TALLY.pack(
                    *place(kept.max), *place(share),
                    *place(sums.received),
                    *(needs.bins or (0, 0)), *grid(sums.map),
                    slot.data_ptr(), *grid(sums.rows),
                ),
            )
        )  # fmt: skip
        if sums.rows is not None:  # a query asked for twice was kept once
            sums = sums._replace(rows=sums.rows[:, :, slot[needs.exact]])
    return Partial(p, wanted, *everything_of(p), rows, sums), kept.max.double() * unit


def everything_of(p: Problem) -> tuple[Tensor, Tensor]:
    """The queries and keys that a core's partial covers: all."""
    return torch.arange(p.Tq, device=p.device), torch.arange(p.Tk, device=p.device)
