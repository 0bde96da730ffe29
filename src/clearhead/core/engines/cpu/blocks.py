"""Decode with keys and values in blocks of 8 or 4 bits, which the core converts in registers."""

import torch
from torch import Tensor

from ...problem.blocks import BlockTensor
from ...problem.problem import Inputs, Problem
from ..operators import with_rows
from .call import all_plain, args_of, check, core


def decoded(p: Problem, inputs: Inputs, lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Compute the output, and with `lse` the log-sum-exp of every query in float64.

    Return None for other inputs than blocks of one format, for more rows of a KV head than the
    core decodes, and where gradients, dropout or a tracer need ordinary tensors.
    """
    q, k, v = inputs
    if not (isinstance(k, BlockTensor) and isinstance(v, BlockTensor) and k.format == v.format):
        return None
    plain = all_plain(p, Inputs(q, k.stored, v.stored))
    if p.grad or p.dropout or p.H // p.G * p.Tq > core.block_rows() or not plain:
        return None
    query = with_rows(q.float())
    out = query.new_empty(p.B, p.H, p.Tq, p.Dv)
    sums = query.new_empty(p.B, p.H, p.Tq, dtype=torch.float64) if lse else None
    stored = with_rows(k.stored), with_rows(v.stored)
    check(core.attend_blocks(query, *stored, out, sums, k.format, args_of(p)))
    return out.to(q.dtype), sums
