"""Call torch's kernels so that NaN and infinity in masked keys do not reach the output.

torch's kernels add -inf to masked scores and multiply values by a weight of 0, so NaN or infinity
of a masked key reaches the output or its gradient. Here such numbers are replaced by 0 before the
call. Afterwards, a query that holds one or may look at one gets NaN.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem.nan_safe import cleaned
from ..problem.problem import Inputs, Problem
from ..torch_state import has_values
from .devices import policy_of


def compute_cleaned(p: Problem, inputs: Inputs, compute: Callable[[Inputs], Tensor]) -> Tensor:
    """Return `compute` of the inputs without NaN and infinity, (B, H, Tq, Dv); NaN for a query that
    sees one, and 0 for a fully masked query."""
    q, k, v = inputs
    fully_masked = (p.key_ranges.keys_per_query() == 0).unsqueeze(-1)
    is_nan = _sees_nonfinite(p, k, v).unsqueeze(-1) | ~torch.isfinite(q).all(-1, keepdim=True)
    out = compute(Inputs(cleaned(q).masked_fill(fully_masked, 0.0), cleaned(k), cleaned(v)))
    return out.masked_fill(is_nan, float("nan")).masked_fill(fully_masked, 0.0)


def is_finite(*tensors: Tensor) -> bool:
    """Return whether the sum of each tensor is finite, which excludes NaN and infinity in it.

    It is False where values cannot be read without a wait: under a tracer, and on a GPU.
    """
    return has_values(*tensors) and all(
        policy_of(x.device).reads_values and bool(torch.isfinite(x.sum())) for x in tensors
    )


def _sees_nonfinite(p: Problem, k: Tensor, v: Tensor) -> Tensor:
    """Return whether each query may look at a key that holds NaN or infinity, (B, H, Tq). If the
    mask has no bits, this takes O(Tq x ranges)."""
    nonfinite = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1))
    nonfinite = nonfinite.repeat_interleave(p.H // max(p.G, 1), 1) if p.G != p.H else nonfinite
    if p.key_ranges.bits is not None:
        looks = p.key_ranges.to_bool().to(p.wide) @ nonfinite.to(p.wide).unsqueeze(-1)
        return (looks.squeeze(-1) > 0).expand(p.B, p.H, p.Tq)
    before = F.pad(nonfinite.long().cumsum(-1), (1, 0))
    ranges = p.key_ranges.lo.shape[-1]
    lo, hi = (
        before.gather(-1, edge.expand(p.B, p.H, p.Tq, ranges).flatten(2))
        for edge in (p.key_ranges.lo, p.key_ranges.hi)
    )
    return (hi > lo).unflatten(2, (p.Tq, ranges)).any(-1)
