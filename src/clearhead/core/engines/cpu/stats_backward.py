"""Compute the gradients of the statistics that the core computes.

For sums of weights and their logarithms (`lse`, `entropy`, `effective`, `mass`, `received`) they
have a closed form, which the core computes (kernels/generic/backward.h). For other statistics, and
for second derivatives, torch recomputes the statistics strip by strip (core/stats/sweep.py).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...masks.key_ranges import UNLIMITED, KeyRanges
from ...problem.biases import TensorBias
from ...problem.online_softmax import State
from ...problem.problem import Inputs, Problem, repeat_heads
from ...stats import Partial, Statistics, mass
from ...stats.statistic import WeightSums, empty_rows, finish_rows
from ...stats.sweep import add_gradients, sweep_gradients
from ...torch_state import in_forward_mode, is_unbatched
from ..operators import KernelArgs, with_own_buffers
from .backward import OutputGrads, gradients, log_unit
from .call import all_plain, args_of, attend
from .stats import core_stats


def core_stats_with_grad(p: Problem, inputs: Inputs, statistics: Statistics) -> Partial:
    """Return `core_stats` of a problem whose tensors require gradients. Only the inputs, the
    largest logits and the sums of rows are saved."""
    bias = p.bias.tensor if isinstance(p.bias, TensorBias) else None
    tensors = _CoreStats.apply(p, inputs, statistics, inputs.q, inputs.k, bias, p.sinks)
    rows, sums = _rows_and_sums(p, statistics, tensors)
    return Partial.of_all(p, statistics, rows, sums or None)


class InputGrads(NamedTuple):
    """Gradients of the tensors that weights depend on; None if a tensor needs none."""

    q: Tensor | None = None
    k: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class _CoreStats(torch.autograd.Function):
    """An autograd function that returns the tensors of rows and of weight sums as one tuple."""

    @staticmethod
    @with_own_buffers
    def forward(
        ctx: Any, p: Problem, inputs: Inputs, statistics: Statistics, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        part, top = core_stats(p, inputs, statistics)
        assert part.rows is not None
        ctx.set_materialize_grads(False)
        # The problem is stored without its tensors, so that autograd frees them.
        bias = None if isinstance(p.bias, TensorBias) else p.bias
        ctx.problem = replace(p, bias=bias, sinks=None), statistics
        ctx.save_for_backward(top, part.rows.sum.detach(), *tensors)
        return *part.rows.tensors(), *(part.sums or {}).values()

    @staticmethod
    @with_own_buffers
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        p, statistics = ctx.problem
        top, total, *tensors = ctx.saved_tensors
        with torch.enable_grad():  # views, because keys and queries may be one tensor
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
            by_core = _ByCore(p, inputs, top, total, needed[2])
            (moment,), (groups,) = (rows.more.get(name, (None,)) for name in ("moment", "groups"))
            received = sums.pop("received", None)
            if rows.sum is not None or moment is not None:
                result = by_core.of_rows(rows.sum, moment)
            of_mass = [g for s in statistics if isinstance(s, mass) for g in s.key_groups(p)]
            by_id = any(group.documents for group in of_mass)  # the backward pass reads no ids
            if groups is not None and not by_id:
                result = _sum(result, by_core.of_masses(groups, [g.ranges for g in of_mass]))
            if received is not None:
                result = _sum(result, by_core.of_received(received))
            of_torch = {"weighted", "value_weighted"} | ({"groups"} if by_id else set())
            left: list[Iterable[Tensor | None]] = [
                x if name in of_torch else [None for _ in x] for name, x in rows.more.items()
            ]
            of_rows[1:] = None, *chain(*left)
        if any(g is not None for g in (*of_rows, *sums.values())):
            recomputed = sweep_gradients(
                p,
                inputs,
                statistics,
                top=top.to(p.wide),
                rows=of_rows,
                sums=sums,
                learning=[x for x, needs_grad in zip(tensors, needed, strict=True) if needs_grad],
            )
            remaining = iter(recomputed)
            more = InputGrads(*(next(remaining) if needs_grad else None for needs_grad in needed))
            result = _sum(result, more)
        # Without a visible key nothing was computed, and the gradient is 0.
        finished = (
            (torch.zeros_like(of) if x is None else x) if needs_grad else None
            for x, of, needs_grad in zip(result, tensors, needed, strict=True)
        )
        return None, None, None, *finished


class _ByCore(NamedTuple):
    """A call whose gradients the core computes.

    `top` is m, the largest logit of a query, and `total` is S, the sum of exp(x - m) over all keys.
    So a weight w is exp(x - m) / S.
    """

    p: Problem
    inputs: Inputs
    top: Tensor
    total: Tensor
    bias_grad: bool

    @property
    def lse(self) -> Tensor:
        return self.top + self.total.double().log() * log_unit(self.top)

    def of_rows(self, of_sum: Tensor | None, of_moment: Tensor | None) -> InputGrads:
        """Compute gradients of the inputs from those of the sums and the moments.

        dS and dM are the gradients of the sum S and of the moment Σ exp(x - m) (x - m). The
        gradient of a logit is

            w S (dS + dM (1 + x - m)) = w (S dM ln w + S (dS + dM (1 + ln S)))
        """
        total = self.total
        dlse, dw_log_w = torch.zeros_like(total), None
        if of_sum is not None:
            dlse = total * of_sum
        if of_moment is not None:
            dw_log_w = total * of_moment
            dlse = dlse + dw_log_w * (1 + total.log().masked_fill(total == 0, 0.0))
        args = args_of(self.p)._replace(sinks=None)
        return self.of_outputs(args, self.lse, OutputGrads(dlse=dlse, dw_log_w=dw_log_w))

    def of_masses(self, grad: Tensor, groups: Sequence[KeyRanges]) -> InputGrads:
        """Compute gradients of the inputs from those of Σ exp(x - m) over the keys of each group,
        (B, H, Tq, groups).

        The gradient d of a group's sum gives its logits the gradient w S d, and other logits none.
        That is the gradient of a log-sum-exp over the group, times S d, with the weights w over all
        keys.
        """
        lse, args = self.lse, args_of(self.p)._replace(sinks=None)
        result = InputGrads()
        for group, of_group in zip(groups, grad.unbind(-1), strict=True):
            visible = self.p.key_ranges & group
            within = args._replace(
                before=UNLIMITED, after=UNLIMITED, lo=visible.lo, hi=visible.hi, bits=visible.bits
            )
            of = OutputGrads(dlse=self.total * of_group)
            result = _sum(result, self.of_outputs(within, lse, of))
        return result

    def of_received(self, grad: Tensor) -> InputGrads:
        """Compute gradients of the inputs from the gradient r of `received`.

        A logit has the gradient w (r - Σ w r). The sum over the keys is the output of attention
        with r as values. With a sink, weights sum to less than 1.
        """
        p, top = self.p, self.top
        args, r = args_of(p), grad.resolve_neg().contiguous()
        q, k = self.inputs.q.float(), repeat_heads(self.inputs.k.float(), p.H)
        mean, _, _ = attend(q, k, r.unsqueeze(-1), args, False)
        share = finish_rows(State(top.to(p.wide), self.total, {}), p.sinks).factor
        lse = top - share.double().log() * log_unit(top)
        lse = lse.masked_fill(top == -math.inf, -math.inf)
        return self.of_outputs(args, lse, OutputGrads(dlse=-mean.squeeze(-1), dreceived=r))

    def of_outputs(self, args: KernelArgs, lse: Tensor, of: OutputGrads) -> InputGrads:
        p, (q, k, _) = self.p, self.inputs
        dq, dk, _, dbias, dsinks = gradients(q, k, k[..., :0], args, lse, of, self.bias_grad)
        if dbias is not None and isinstance(p.bias, TensorBias):
            dbias = dbias.reshape(p.bias.tensor.shape).to(p.bias.tensor.dtype)
        if dsinks is not None and p.sinks is not None:
            dsinks = dsinks.to(p.sinks.dtype)
        return InputGrads(dq, dk, dbias, dsinks)


def _sum(a: InputGrads, b: InputGrads) -> InputGrads:
    return InputGrads(*map(add_gradients, a, b))


def _rows_and_sums(
    p: Problem, statistics: Statistics, tensors: Iterable[Any]
) -> tuple[State, WeightSums]:
    """Split the tuple of `_CoreStats` into rows and weight sums; a tensor may be a gradient, or
    None."""
    x = iter(tensors)
    rows = empty_rows(p, statistics, 0).with_tensors(x)
    return rows, dict(zip((s.name for s in statistics if s.sweep == "second"), x, strict=True))
