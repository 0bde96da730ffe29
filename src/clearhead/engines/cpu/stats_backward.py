"""Gradients of the statistics that the core computes.

Those of sums of weights and of their logarithms (`lse`, `entropy`, `effective`, `mass`, `received`)
have a closed form, which the core computes (kernels/generic/backward.h). For the others, and for
derivatives of derivatives, torch computes the statistics again, strip by strip (stats/sweep.py).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...masks.key_ranges import UNLIMITED, KeyRanges
from ...problem.biases import TensorBias
from ...problem.online_softmax import State
from ...problem.problem import Inputs, Problem, repeat_heads
from ...stats import Partial, Statistic, mass
from ...stats.statistic import WeightSums, empty_rows, finish_rows
from ...stats.sweep import both, sweep_gradients
from ...torch_state import in_forward_mode, is_unbatched
from ..operators import KernelArgs, with_own_buffers
from .backward import OutputGrads, gradients, log_unit
from .pack import all_plain, args_of, attend
from .stats import core_stats_and_max


def core_stats_with_grad(p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> Partial:
    """`core_stats` of a problem whose tensors require gradients; only the inputs are saved."""
    bias = p.bias.tensor if isinstance(p.bias, TensorBias) else None
    tensors = _CoreStats.apply(p, inputs, statistics, inputs.q, inputs.k, bias, p.sinks)
    rows, sums = _rows_and_sums(p, statistics, tensors)
    return Partial.of_all(p, statistics, rows, sums or None)


class InputGrads(NamedTuple):
    """Gradients of what a weight depends on; None for no gradient."""

    q: Tensor | None = None
    k: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class _CoreStats(torch.autograd.Function):
    """The tensors of the rows and of the weight sums, as one tuple."""

    @staticmethod
    @with_own_buffers
    def forward(
        ctx: Any,
        p: Problem,
        inputs: Inputs,
        statistics: tuple[Statistic, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        part, top = core_stats_and_max(p, inputs, statistics, None)
        assert part.rows is not None
        ctx.set_materialize_grads(False)
        # All tensors of the problem are saved as tensors, so that autograd frees them.
        bias = None if isinstance(p.bias, TensorBias) else p.bias
        ctx.problem = replace(p, bias=bias, sinks=None), statistics
        ctx.save_for_backward(top, part.rows.sum.detach(), *tensors)
        return *part.rows.tensors(), *(part.sums or {}).values()

    @staticmethod
    @with_own_buffers
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        p, statistics = ctx.problem
        top, total, *tensors = ctx.saved_tensors
        with torch.enable_grad():  # views: the keys may be the same tensor as the queries
            tensors = [None if x is None else x.view_as(x) for x in tensors]
        q, k, bias, sinks = tensors
        p = replace(p, bias=p.bias if bias is None else TensorBias(bias), sinks=sinks)
        inputs = Inputs(q, k, k)  # the values are not read
        needed = ctx.needs_input_grad[3:]
        rows, sums = _rows_and_sums(p, statistics, grads)
        of_rows: list[Tensor | None] = [*rows.tensors()]
        result = InputGrads()
        differentiated = torch.is_grad_enabled() or in_forward_mode()
        if not differentiated and all_plain(p, inputs) and is_unbatched(*grads):
            (moment,), (groups,) = (rows.more.get(name, (None,)) for name in ("moment", "groups"))
            received = sums.pop("received", None)
            if rows.sum is not None or moment is not None:
                result = _of_rows(p, inputs, top, total, (rows.sum, moment), needed[2])
            if groups is not None:
                ranges = [r for s in statistics if isinstance(s, mass) for r in s.ranges(p)]
                more = _of_masses(p, inputs, top, total, groups, ranges, needed[2])
                result = _sum(result, more)
            if received is not None:
                more = _of_received(p, inputs, top, total, received, needed[2])
                result = _sum(result, more)
            of_rows[1:] = [None] * len(of_rows[1:])
        if any(g is not None for g in (*of_rows, *sums.values())):
            again = sweep_gradients(
                p,
                inputs,
                statistics,
                top=top.to(p.wide),
                rows=of_rows,
                sums=sums,
                learning=[x for x, needs_grad in zip(tensors, needed, strict=True) if needs_grad],
            )
            found = iter(again)
            result = _sum(
                result, InputGrads(*(next(found) if needs_grad else None for needs_grad in needed))
            )
        # Without a visible key nothing was computed, which is a gradient of 0.
        finished = (
            (torch.zeros_like(of) if x is None else x) if needs_grad else None
            for x, of, needs_grad in zip(result, tensors, needed, strict=True)
        )
        return None, None, None, *finished


def _of_rows(
    p: Problem,
    inputs: Inputs,
    top: Tensor,
    total: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    bias_grad: bool,
) -> InputGrads:
    """From the gradients of the sums and the moments to those of the inputs.

    With m the `top`, S = Σ exp(x - m) the `total`, w = exp(x - m) / S, and dS and dM the gradients
    of the sum and of the moment Σ exp(x - m) (x - m), the gradient of a logit is

        w S (dS + dM (1 + x - m)) = w (S dM ln w + S (dS + dM (1 + ln S)))
    """
    of_sum, of_moment = grads
    dlse, dw_log_w = torch.zeros_like(total), None
    if of_sum is not None:
        dlse = total * of_sum
    if of_moment is not None:
        dw_log_w = total * of_moment
        dlse = dlse + dw_log_w * (1 + total.log().masked_fill(total == 0, 0.0))
    lse, args = _lse(top, total), args_of(p)._replace(sinks=None)
    return _back(p, inputs, args, lse, OutputGrads(dlse=dlse, dw_log_w=dw_log_w), bias_grad)


def _of_masses(
    p: Problem,
    inputs: Inputs,
    top: Tensor,
    total: Tensor,
    grad: Tensor,
    groups: Sequence[KeyRanges],
    bias_grad: bool,
) -> InputGrads:
    """From the gradients (B, H, Tq, groups) of Σ exp(x - m) over the keys of a group: those of the
    logits are w S d, in the group alone. So they are the gradients of a log-sum-exp, times S d,
    under the mask and the group, with weights that are still shares of all keys."""
    lse, args = _lse(top, total), args_of(p)._replace(sinks=None)
    result = InputGrads()
    for group, of_group in zip(groups, grad.unbind(-1), strict=True):
        visible = p.key_ranges & group
        within = args._replace(
            before=UNLIMITED, after=UNLIMITED, lo=visible.lo, hi=visible.hi, bits=visible.bits
        )
        of = OutputGrads(dlse=total * of_group)
        result = _sum(result, _back(p, inputs, within, lse, of, bias_grad))
    return result


def _lse(top: Tensor, total: Tensor) -> Tensor:
    return top + total.double().log() * log_unit(top)


def _of_received(
    p: Problem, inputs: Inputs, top: Tensor, total: Tensor, grad: Tensor, bias_grad: bool
) -> InputGrads:
    """From the gradient r of `received`: that of a logit is w (r - Σ w r), and the sum over the
    keys is the output of attention with r as values. With a sink, weights sum to less than 1."""
    args, r = args_of(p), grad.resolve_neg().contiguous()
    q, k = inputs.q.float(), repeat_heads(inputs.k.float(), p.H)
    mean, _, _ = attend(q, k, r.unsqueeze(-1), args, False)
    share = finish_rows(State(top.to(p.wide), total, {}), p.sinks).share
    lse = top - share.double().log() * log_unit(top)
    lse = lse.masked_fill(top == -math.inf, -math.inf)
    of = OutputGrads(dlse=-mean.squeeze(-1), dreceived=r)
    return _back(p, inputs, args, lse, of, bias_grad)


def _back(
    p: Problem, inputs: Inputs, args: KernelArgs, lse: Tensor, of: OutputGrads, bias_grad: bool
) -> InputGrads:
    q, k, _ = inputs
    dq, dk, _, dbias, dsinks = gradients(q, k, k[..., :0], args, lse, of, bias_grad)
    bias = p.bias.tensor if bias_grad and isinstance(p.bias, TensorBias) else None
    return InputGrads(
        dq,
        dk,
        None if bias is None else dbias.reshape(bias.shape).to(bias.dtype),
        None if args.sinks is None or p.sinks is None else dsinks.to(p.sinks.dtype),
    )


def _sum(a: InputGrads, b: InputGrads) -> InputGrads:
    return InputGrads(*map(both, a, b))


def _rows_and_sums(
    p: Problem, statistics: tuple[Statistic, ...], tensors: Iterable[Any]
) -> tuple[State, WeightSums]:
    """The inverse of what `_CoreStats` does to these; tensors may be gradients, and None."""
    x = iter(tensors)
    rows = empty_rows(p, statistics, 0).with_tensors(x)
    return rows, dict(zip((s.name for s in statistics if s.sweep == "second"), x, strict=True))
