"""Compute gradients of the inputs from those of the outputs, by kernels/generic/backward.h."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..operators import KernelArgs, with_rows
from .call import check, with_number
from .extension import core, must_have_fields

# A task of the backward pass is a head. With fewer than TASKS heads, the keys are split into ranges
# of at least MIN_SPLIT. Each split has its own dq, and these are added in order. The batch size has
# no influence, so an example's gradients have the same bits in any batch.
TASKS, MIN_SPLIT = 16, 1024


class Gradients(NamedTuple):
    """Gradients of the outputs and of the inputs, as the core reads them (kernels/attention.h)."""

    dout: Tensor | None
    dlse: Tensor | None
    dw_log_w: Tensor | None
    dreceived: Tensor | None
    delta: Tensor
    dq: Tensor
    key_splits: int
    dq_split_stride: int
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    of_these_keys: bool


must_have_fields(Gradients)


class OutputGrads(NamedTuple):
    """Gradients of the outputs (kernels/attention.h, `Gradients`), None for an unused output; and
    the output with its rounding error. `of_these_keys` is true if output and log-sum-exp come from
    exactly the keys of the call, and false if they may come from more keys."""

    dlse: Tensor | None = None
    dw_log_w: Tensor | None = None
    dreceived: Tensor | None = None
    dout: Tensor | None = None
    out: Tensor | None = None
    rounding: Tensor | None = None
    of_these_keys: bool = False


def gradients(
    q: Tensor, k: Tensor, v: Tensor, args: KernelArgs, lse: Tensor, of: OutputGrads, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, bias and sinks. The one of the bias is empty without
    `bias_grad`, the one of the sinks without sinks."""
    bias, sinks = args.bias if bias_grad else None, args.sinks
    q, k, v = (with_rows(x) for x in (q, k, v))
    (B, H, Tq, D), (_, G, Tk, Dv) = q.shape, v.shape

    def zeros(*shape: int) -> Tensor:
        return q.new_zeros(shape, dtype=torch.float32)

    splits = min(math.ceil(TASKS / max(H, 1)), max(Tk // MIN_SPLIT, 1))
    dbias = zeros(0)
    if bias is not None:
        # A bias that broadcasts over queries or keys is summed per head first: O(T) numbers.
        matrix = bias.shape[2] > 1 and bias.shape[3] > 1
        dbias = zeros(*(bias.shape if matrix else (B, H, *bias.shape[2:])))
        splits = 1 if bias.shape[3] == 1 else splits
    delta = zeros(B, H, Tq)
    dq = q.new_zeros((splits, B, H, Tq, D), dtype=q.dtype if splits == 1 else torch.float32)
    dk, dv = zeros(B, H, Tk, D), zeros(B, H, Tk, Dv)
    check(
        core.backward(
            q, k, v, of.out, lse, of.rounding, with_number(args),
            Gradients(
                of.dout, of.dlse, of.dw_log_w, of.dreceived, delta, dq[0], splits, dq.stride(0),
                dk, dv, None if bias is None else dbias, of.of_these_keys,
            ),
        )
    )  # fmt: skip
    if bias is not None:
        for dim in (0, 1):
            dbias = _sum(dbias, dim, bias.shape[dim])
        dbias = dbias.to(bias.dtype)
    dsinks = zeros(0)
    if sinks is not None:
        grads = torch.exp((sinks.view(-1, 1) - lse) / log_unit(lse)).float() * delta
        dsinks = -_over_queries(_sum(grads.masked_fill(lse == -math.inf, 0.0), 0, 1).squeeze(0))
    if H != G:  # a key head has the gradients of its query heads
        of_group = B, G, H // max(G, 1), Tk
        dk = _sum(dk.view(*of_group, D), 2, 1).squeeze(2)
        dv = _sum(dv.view(*of_group, Dv), 2, 1).squeeze(2)
    return _sum(dq, 0, 1).squeeze(0).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dbias, dsinks


def _sum(x: Tensor, dim: int, size: int) -> Tensor:
    """Sum over a dimension, unless it already has this size. Slices are added in order, so that the
    bits do not depend on torch's number of threads."""
    if x.shape[dim] == size:
        return x
    total = torch.zeros_like(x.narrow(dim, 0, 0).sum(dim, keepdim=True))
    for i in range(x.shape[dim]):
        total += x.narrow(dim, i, 1)
    return total


def log_unit(lse: Tensor) -> Tensor:
    """Return the unit of log(sum) in a log-sum-exp (kernels/generic/functions.h, `log_unit`)."""
    power = torch.frexp(lse.nan_to_num(0.0, 0.0, 0.0)).exponent - 33
    return torch.ldexp(torch.ones_like(lse), power.clamp(min=0))


def _over_queries(x: Tensor) -> Tensor:
    """Sum (H, Tq) over the queries by pairs, in a fixed order. Returns (H,)."""
    while x.shape[-1] > 1:
        x = pad(x, (0, x.shape[-1] % 2))
        x = x[:, ::2] + x[:, 1::2]
    return x.sum(-1)
