"""Compare attention with attention on other keys, by kernels/generic/divergence.h."""

import torch
from torch import Tensor

from ...masks import Mask
from ...problem.problem import Inputs, Problem
from ..operators import MaskArgs, mask_args, with_own_buffers, with_rows
from .call import all_plain, args_of, check
from .extension import core

# A sum of products errs in proportion to the logit: beyond this one, by more than 1e-5.
LARGEST_LOGIT = 90.0


NO_PAIRS: MaskArgs = (-1, 0, None, None, None)


@with_own_buffers
def core_divergences(
    p: Problem, inputs: Inputs, other: Problem, others: Inputs, exact: Mask | None = None
) -> Tensor | None:
    """Compute KL(w || w'), KL(w' || w), mass and lost, (4, B, H, Tq), as in `ch.divergence`.

    Return None where the core would err by more than 1e-5: of float64, or if a logit exceeds
    `LARGEST_LOGIT` or is NaN.
    """
    if p.wide == torch.float64 or p.dropout or not (all_plain(p, inputs) and all_plain(p, others)):
        return None
    q, k, other_k = (x.to(torch.float32) for x in (inputs.q, inputs.k, others.k))
    gaps = with_rows(k[..., :0] if others.k is inputs.k else k - other_k)
    args = args_of(p)
    seen = args[2:7] if other.mask is p.mask else _mask_args(other.mask, p)
    same = NO_PAIRS if exact is None else _mask_args(exact, p)
    numbers = q.new_empty(5, p.B, p.H, p.Tq)
    check(core.diverge(with_rows(q), with_rows(k), gaps, args, seen, same, tuple(numbers)))
    return numbers[:4] if bool((numbers[4].abs() <= LARGEST_LOGIT).all()) else None


def _mask_args(mask: Mask, p: Problem) -> MaskArgs:
    return mask_args(mask, p.grid, lambda: mask.key_ranges(p.grid, p.device))
