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
    head_dk: Tensor
    head_dv: Tensor
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of q, k, v, bias and sinks. The one of the bias is None without
    `bias_grad`, the one of the sinks without sinks."""
    bias, sinks = args.bias if bias_grad else None, args.sinks
    q, k, v = (with_rows(x) for x in (q, k, v))
    (B, H, Tq, D), (_, G, Tk, Dv) = q.shape, v.shape
    # Without pairs the core writes nothing.
    new = q.new_empty if q.numel() and k.numel() else q.new_zeros
    splits = min(math.ceil(TASKS / max(H, 1)), max(Tk // MIN_SPLIT, 1))
    dbias = None
    if bias is not None:
        # A bias that broadcasts over queries or keys is summed per head first: O(T) numbers.
        matrix = bias.shape[2] > 1 and bias.shape[3] > 1
        shape = bias.shape if matrix else (B, H, *bias.shape[2:])
        dbias = q.new_zeros(shape, dtype=torch.float32)
        splits = 1 if bias.shape[3] == 1 else splits
    delta = new(B, H, Tq, dtype=torch.float32)
    parts = new(splits, B, H, Tq, D, dtype=torch.float32) if splits > 1 else None
    dq = new(B, H, Tq, D) if parts is None else parts[0]
    dk, dv = new(B, G, Tk, D), new(B, G, Tk, Dv)
    head_dk, head_dv = dk, dv
    if H != G or q.dtype != torch.float32:
        head_dk, head_dv = (new(B, H, Tk, size, dtype=torch.float32) for size in (D, Dv))
    check(
        core.backward(
            q, k, v, of.out, lse, of.rounding, with_number(args),
            Gradients(
                of.dout, of.dlse, of.dw_log_w, of.dreceived, delta,
                dq, splits, 0 if parts is None else parts.stride(0),
                head_dk, head_dv, dk, dv, dbias, of.of_these_keys,
            ),
        )
    )  # fmt: skip
    if parts is not None:
        dq = _sum(parts, 0, 1).squeeze(0).to(q.dtype)
    if bias is not None and dbias is not None:
        for dim in (0, 1):
            dbias = _sum(dbias, dim, bias.shape[dim])
        dbias = dbias.to(bias.dtype)
    dsinks = None
    if sinks is not None:
        grads = torch.exp((sinks.view(-1, 1) - lse) / log_unit(lse)).float() * delta
        dsinks = -_over_queries(_sum(grads.masked_fill(lse == -math.inf, 0.0), 0, 1).squeeze(0))
    return dq, dk, dv, dbias, dsinks


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
