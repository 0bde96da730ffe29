"""The way back of statistics that the core counted.

Those that come from sums of weights and of their logarithms (`lse`, `entropy`, `effective`, `mass`,
`received`) have gradients in closed form, and the core answers (kernels/generic/backward.h). The others,
and derivatives of derivatives, are counted again by torch, strip by strip (stats/gather.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...masks.key_ranges import EVERY_KEY, KeyRanges
from ...problem.biases import TensorBias
from ...problem.problem import Inputs, Problem, repeat_heads
from ...stats import Statistic
from ...stats.buffers import Buffers
from ...stats.partial import Partial
from ...stats.state import Rows, Sums, finish_rows
from ...stats.sweep import both, sweep_gradients
from ...torch_state import in_forward_mode, is_unbatched
from .backward import CameBack, gradients, log_unit
from .pack import Asked, attend, direct, question
from .stats import everything_of, survey_and_top


def survey_with_gradient(p: Problem, inputs: Inputs, wanted: tuple[Statistic, ...]) -> Partial:
    """`survey` of a question whose tensors learn. Watching a model in training keeps no graph."""
    bias = p.bias.tensor if isinstance(p.bias, TensorBias) else None
    counted = _Counted.apply(p, inputs, wanted, inputs.q, inputs.k, bias, p.sinks)
    rows, sums = _rows_and_sums(counted)
    return Partial(p, wanted, *everything_of(p), rows, None if sums == Sums() else sums)


NAMES = *Rows._fields, *Sums._fields


class Learning(NamedTuple):
    """What a weight depends on, or the gradients of it; None is what is not there."""

    q: Tensor | None
    k: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


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
        part, top = survey_and_top(p, inputs, wanted, None)
        assert part.rows is not None
        ctx.set_materialize_grads(False)
        # Every tensor of the question is saved as such, so that the way back lets go of it.
        bias = None if isinstance(p.bias, TensorBias) else p.bias
        ctx.asked = replace(p, bias=bias, sinks=None), wanted
        ctx.save_for_backward(top, part.rows.sum.detach(), *tensors)
        return *part.rows, *(part.sums or Sums())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        p, wanted = ctx.asked
        top, total, *tensors = ctx.saved_tensors
        with torch.enable_grad():  # views, because the keys may be the queries, or come from them
            tensors = [None if x is None else x.view_as(x) for x in tensors]
        q, k, bias, sinks = tensors
        p = replace(p, bias=p.bias if bias is None else TensorBias(bias), sinks=sinks)
        inputs = Inputs(q, k, k)  # the values are not read
        needed = ctx.needs_input_grad[3:]
        given = dict(zip(NAMES, grads, strict=True))
        learned = Learning(None, None, None, None)
        followed = torch.is_grad_enabled() or in_forward_mode()
        if not followed and direct(p, inputs) and is_unbatched(*grads):
            of_rows, of_received = (given["sum"], given["moment"]), given["received"]
            if any(g is not None for g in of_rows):
                learned = _of_rows(p, inputs, top, total, of_rows, needed[2])
            if given["masses"] is not None:
                groups = Buffers(p, wanted).groups
                more = _of_masses(p, inputs, top, total, given["masses"], groups, needed[2])
                learned = _sum(learned, more)
            if of_received is not None:
                more = _of_received(p, inputs, top, total, of_received, needed[2])
                learned = _sum(learned, more)
            given.update(sum=None, moment=None, masses=None, received=None)
        if any(g is not None for g in given.values()):
            rows, sums = _rows_and_sums([given[name] for name in NAMES])
            again = sweep_gradients(
                p,
                inputs,
                wanted,
                top=top.to(p.wide),
                rows=rows,
                sums=sums,
                learning=[x for x, wants in zip(tensors, needed, strict=True) if wants],
            )
            found = iter(again)
            learned = _sum(learned, Learning(*(next(found) if wants else None for wants in needed)))
        # Where nobody sees anything, nothing was learned, which is a gradient of 0.
        finished = (
            (torch.zeros_like(of) if x is None else x) if wants else None
            for x, of, wants in zip(learned, tensors, needed, strict=True)
        )
        return None, None, None, *finished


def _of_rows(
    p: Problem,
    inputs: Inputs,
    top: Tensor,
    total: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    learn_bias: bool,
) -> Learning:
    """From the gradients of the sums and the moments to those of what learns.

    With m the `top`, S = Σ exp(x - m) the `total`, w = exp(x - m) / S, and dS and dM the gradients
    of the sum and of the moment Σ exp(x - m) (x - m), the gradient of a logit is

        w S (dS + dM (1 + x - m)) = w (S dM ln w + S (dS + dM (1 + ln S)))
    """
    of_sum, of_moment = grads
    dlse, dlog = torch.zeros_like(total), None
    if of_sum is not None:
        dlse = total * of_sum
    if of_moment is not None:
        dlog = total * of_moment
        dlse = dlse + dlog * (1 + total.log().masked_fill(total == 0, 0.0))
    lse, asked = _lse(top, total), question(p)._replace(sinks=None)
    return _back(p, inputs, asked, lse, CameBack(dlse=dlse, dlog=dlog), learn_bias)


def _of_masses(
    p: Problem,
    inputs: Inputs,
    top: Tensor,
    total: Tensor,
    grad: Tensor,
    groups: Sequence[KeyRanges],
    learn_bias: bool,
) -> Learning:
    """From the gradients (B, H, Tq, groups) of Σ exp(x - m) over the keys of a group: those of the
    logits are w S d, in the group alone. They are what goes back of a log-sum-exp S d under the
    question's mask and the group, where a weight is still a share of all keys."""
    lse, asked = _lse(top, total), question(p)._replace(sinks=None)
    learned = Learning(None, None, None, None)
    for group, of_group in zip(groups, grad.unbind(-1), strict=True):
        held = p.key_ranges & group
        within = asked._replace(
            before=EVERY_KEY, after=EVERY_KEY, lo=held.lo, hi=held.hi, bits=held.bits
        )
        came = CameBack(dlse=total * of_group)
        learned = _sum(learned, _back(p, inputs, within, lse, came, learn_bias))
    return learned


def _lse(top: Tensor, total: Tensor) -> Tensor:
    return top + total.double().log() * log_unit(top)


def _of_received(
    p: Problem, inputs: Inputs, top: Tensor, total: Tensor, grad: Tensor, learn_bias: bool
) -> Learning:
    """From the gradient r of `received`: that of a logit is w (r - Σ w r), and the sum over the
    keys is what attention answers where r are the values. With a sink, weights sum to less."""
    asked, r = question(p), grad.resolve_neg().contiguous()
    q, k = inputs.q.float(), repeat_heads(inputs.k.float(), p.H)
    given, _, _ = attend(q, k, r.unsqueeze(-1), asked, False)
    share = finish_rows(Rows(top.to(p.wide), total), p.sinks).share
    lse = top - share.double().log() * log_unit(top)
    lse = lse.masked_fill(top == -math.inf, -math.inf)
    came = CameBack(dlse=-given.squeeze(-1), dreceived=r)
    return _back(p, inputs, asked, lse, came, learn_bias)


def _back(
    p: Problem, inputs: Inputs, asked: Asked, lse: Tensor, came: CameBack, learn_bias: bool
) -> Learning:
    q, k, _ = inputs
    dq, dk, _, dbias, dsinks = gradients(q, k, k[..., :0], asked, lse, came, learn_bias)
    bias = p.bias.tensor if learn_bias and isinstance(p.bias, TensorBias) else None
    return Learning(
        dq,
        dk,
        None if bias is None else dbias.reshape(bias.shape).to(bias.dtype),
        None if asked.sinks is None or p.sinks is None else dsinks.to(p.sinks.dtype),
    )


def _sum(a: Learning, b: Learning) -> Learning:
    return Learning(*map(both, a, b))


def _rows_and_sums(parts: Sequence[Any]) -> tuple[Rows, Sums]:
    n = len(Rows._fields)
    return Rows(*parts[:n]), Sums(*parts[n:])
