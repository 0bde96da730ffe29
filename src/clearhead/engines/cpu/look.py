"""Statistics by the C++ core: the rows' in the sweep that answers, sums of weights in a second.

The core leaves what `stats/state.py` describes, in units of its own (kernels/attention.h, `Survey`
and `Tally`); here it becomes a `Partial`, which finishes and merges like any other. It has a
gradient, too: on the way back, and only there, torch counts again what the core counted.
"""

import math
import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...biases import TensorBias
from ...online import anchor
from ...problem import Inputs, Problem
from ...stats import Statistic
from ...stats.gather import gather_gradients
from ...stats.needs import Needs
from ...stats.partial import Partial
from ...stats.state import Rows, Sums, finish_rows
from .call import NO_PLACE, check, grid, pack, place, question, rows_of
from .extension import core
from .operator import answer

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
    return out, Partial(replace(p, sinks=None), wanted, *_all(p), rows, None)


def survey(
    p: Problem, inputs: Inputs, wanted: tuple[Statistic, ...], out: Tensor | None
) -> Partial:
    """The statistics of all queries on all keys. With `out`, an empty tensor, the same sweep
    answers into it; with None the values are not read."""
    needs = Needs(p, wanted)
    q, k, v = (rows_of(x) for x in inputs)
    asked = question(p)

    kept = needs.no_rows(p.Tq)
    groups = [(reach.lo, reach.hi, reach.bits) for reach in needs.groups]
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
                pack(q, k, v, None, None, asked),
                TALLY.pack(
                    *place(kept.max), *place(share),
                    *(NO_PLACE if sums.received is None else (*place(sums.received)[:3], 1)),
                    *(needs.bins or (0, 0)), *grid(sums.map),
                    slot.data_ptr(), *grid(sums.rows),
                ),
            )
        )  # fmt: skip
        if sums.rows is not None:  # a query asked for twice was kept once
            sums = sums._replace(rows=sums.rows[:, :, slot[needs.exact]])
    return Partial(p, wanted, *_all(p), rows, sums)


def survey_with_gradient(p: Problem, inputs: Inputs, wanted: tuple[Statistic, ...]) -> Partial:
    """`survey` of a question whose tensors learn. Watching a model in training keeps no graph."""
    bias = p.bias.tensor if isinstance(p.bias, TensorBias) else None
    counted = _Counted.apply(p, inputs, wanted, inputs.q, inputs.k, bias, p.sinks)
    rows, sums = _rows_and_sums(counted)
    return Partial(p, wanted, *_all(p), rows, None if sums == Sums() else sums)


class _Counted(torch.autograd.Function):
    """The rows and sums of a survey, as one tuple."""

    @staticmethod
    def forward(
        ctx: Any,
        p: Problem,
        inputs: Inputs,
        wanted: tuple[Statistic, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        part = survey(p, inputs, wanted, None)
        assert part.rows is not None
        ctx.set_materialize_grads(False)
        # Every tensor of the question is saved as such, so that the way back lets go of it.
        bias = None if isinstance(p.bias, TensorBias) else p.bias
        ctx.asked = replace(p, bias=bias, sinks=None), wanted
        ctx.save_for_backward(part.rows.max, *tensors)
        return *part.rows, *(part.sums or Sums())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        p, wanted = ctx.asked
        top, *tensors = ctx.saved_tensors
        with torch.enable_grad():  # views, because the keys may be the queries, or come from them
            tensors = [None if x is None else x.view_as(x) for x in tensors]
        q, k, bias, sinks = tensors
        again = replace(p, bias=p.bias if bias is None else TensorBias(bias), sinks=sinks)
        rows, sums = _rows_and_sums(grads)
        learned = gather_gradients(
            again,
            Inputs(q, k, k),  # the values are not read
            wanted,
            top=top.detach(),
            rows=rows,
            sums=sums,
            learning=[
                x for x, needed in zip(tensors, ctx.needs_input_grad[3:], strict=True) if needed
            ],
        )
        found = iter(learned)
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def _rows_and_sums(parts: tuple[Any, ...]) -> tuple[Rows, Sums]:
    n = len(Rows._fields)
    return Rows(*parts[:n]), Sums(*parts[n:])


def _all(p: Problem) -> tuple[Tensor, Tensor]:
    """The queries and keys that a core's partial covers: all."""
    return torch.arange(p.Tq, device=p.device), torch.arange(p.Tk, device=p.device)
