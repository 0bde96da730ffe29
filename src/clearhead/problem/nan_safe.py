"""The two matrix products of attention, with NaN and infinity kept behind the mask.

A masked key must have no effect, whatever it holds. In plain arithmetic it has one: its weight is
0, but 0 * NaN is NaN, in the weighted sum and again in the backward pass. So where a row holds NaN
or infinity, the product is taken of a cleaned copy, and the cells that may see the row get what
plain arithmetic gives. Finite inputs, the usual case, cost one check.
"""

import torch
from torch import Tensor

from ..torch_state import has_values


def scores(q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
    """Q K^T, (..., q, d) x (..., k, d) -> (..., q, k); cells outside `keep` may hold anything."""
    if keep is None or (finite(q) and finite(k)):
        return q @ k.transpose(-1, -2)
    bad_q, bad_k = (~torch.isfinite(x).all(-1) for x in (q, k))
    clean = cleaned(q) @ cleaned(k).transpose(-1, -2)
    true = (q.detach() @ k.detach().transpose(-1, -2)).masked_fill(~keep, 0.0)
    return torch.where(bad_q.unsqueeze(-1) | bad_k.unsqueeze(-2), true, clean)


def weighted_sum(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """weights @ V, (..., q, k) x (..., k, v) -> (..., q, v); keys outside `keep` give nothing."""
    if keep is None or finite(v):
        return weights @ v
    looks = keep.to(v.dtype)
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    nan, above, below = ((looks @ kind(v).to(v.dtype)) > 0 for kind in kinds)
    spoiled = torch.zeros_like(above, dtype=v.dtype)
    spoiled = spoiled.masked_fill(above, float("inf")).masked_fill(below, float("-inf"))
    # Added and not put in place, so that the gradients of what is finite stay.
    return weights @ cleaned(v) + spoiled.masked_fill(nan | (above & below), float("nan"))


def cleaned(x: Tensor) -> Tensor:
    """The same with 0 in place of NaN and infinity; no gradient goes there."""
    return torch.where(torch.isfinite(x), x, 0.0)


def finite(x: Tensor) -> bool:
    """Is every value known to be finite? While tracing no value is known: then no."""
    return has_values(x) and bool(torch.isfinite(x).all())
