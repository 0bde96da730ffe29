"""The largest parts of each query by the C++ core (`engines/parts.py`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...problem.problem import Inputs, Problem
from ..operators import with_own_buffers, with_rows
from .call import all_plain, args_of, check
from .extension import core, must_have_fields


class LargestParts(NamedTuple):
    """What the core reads and writes: a direction for each query, (B, H, Tq, Dv), and the parts
    with their keys, (B, H, Tq, n) both."""

    directions: Tensor
    parts: Tensor
    keys: Tensor


must_have_fields(LargestParts)


def lists_parts(p: Problem, inputs: Inputs, directions: Tensor) -> bool:
    """Return whether the core can list the parts of this problem, which it computes in float32."""
    return p.wide == torch.float32 and all_plain(p, inputs) and directions.dtype == torch.float32


@with_own_buffers
def core_largest_parts(
    p: Problem, inputs: Inputs, directions: Tensor, n: int
) -> tuple[Tensor, Tensor]:
    q, k, v = (with_rows(x.to(torch.float32)) for x in inputs)
    parts = q.new_empty(p.B, p.H, p.Tq, n)
    keys = q.new_empty(p.B, p.H, p.Tq, n, dtype=torch.long)
    of = LargestParts(with_rows(directions), parts, keys)
    check(core.largest_parts(q, k, v, args_of(p), of))
    return parts, keys
