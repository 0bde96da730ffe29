"""The two matrix products of attention, with NaN and infinity kept behind the mask.

A masked key must not matter, whatever it holds. In plain arithmetic it does: the weight is 0, but
0 * NaN is NaN, in the weighted sum and again in the backward pass. So where a row holds NaN or
infinity, the product runs over a cleaned copy, and the cells that the row really belongs to get
what plain arithmetic gives them. Finite inputs, the usual case, take one look and the plain path.
"""

import torch
from torch import Tensor

from ..torch_state import has_values


def dot(q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
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
    """Is all of it finite, for certain? Nobody can tell while the numbers are still to come."""
    return has_values(x) and bool(torch.isfinite(x).all())
