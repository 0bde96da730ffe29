"""Calling kernels of torch, whose masks let NaN and infinity pass.

They add -inf to what a mask forbids and multiply values by a weight of 0, so what a forbidden key
holds reaches the output, or its gradient. It is cleaned away first; a query that holds such a
number or may look at one gets NaN afterwards.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem.nan_safe import cleaned
from ..problem.problem import Inputs, Problem
from ..torch_state import has_values


def answer_cleaned(p: Problem, inputs: Inputs, answer: Callable[[Inputs], Tensor]) -> Tensor:
    """`answer` of the inputs without NaN and infinity, (B, H, Tq, Dv); NaN where a query sees one,
    and 0 where it sees no key."""
    q, k, v = inputs
    sees_nothing = (p.key_ranges.keys_per_query() == 0).unsqueeze(-1)
    is_nan = _sees_nonfinite(p, k, v).unsqueeze(-1) | ~torch.isfinite(q).all(-1, keepdim=True)
    out = answer(Inputs(cleaned(q).masked_fill(sees_nothing, 0.0), cleaned(k), cleaned(v)))
    return out.masked_fill(is_nan, float("nan")).masked_fill(sees_nothing, 0.0)


def is_finite(*tensors: Tensor) -> bool:
    """Is nothing in them NaN or infinite, as far as one sum each can tell?

    Computed only where values can be read without a wait: not under a tracer, nor on a GPU.
    """
    return has_values(*tensors) and all(
        x.device.type == "cpu" and bool(torch.isfinite(x.sum())) for x in tensors
    )


def _sees_nonfinite(p: Problem, k: Tensor, v: Tensor) -> Tensor:
    """(B, H, Tq): may the query look at a key that holds NaN or infinity? Counted along the ranges,
    in O(Tq x ranges), where the mask has no bits."""
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
