"""Compute the two matrix products of attention without effects of masked NaN and infinity.

A masked key must have no effect. In plain arithmetic it can have one: its weight is 0, but 0 * NaN
is NaN, in the weighted sum and in the backward pass. If a row has NaN or infinity, these functions
multiply a cleaned copy, and give the cells that may see the row the result of plain arithmetic.
Finite inputs, the usual case, cost one check.
"""

import torch
from torch import Tensor

from ..torch_state import has_values


def scores(q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
    """Compute Q K^T, (..., q, d) x (..., k, d) -> (..., q, k), undefined outside `keep`."""
    if keep is None or (finite(q) and finite(k)):
        return q @ k.transpose(-1, -2)
    bad_q, bad_k = (~torch.isfinite(x).all(-1) for x in (q, k))
    clean = cleaned(q) @ cleaned(k).transpose(-1, -2)
    true = (q.detach() @ k.detach().transpose(-1, -2)).masked_fill(~keep, 0.0)
    return torch.where(bad_q.unsqueeze(-1) | bad_k.unsqueeze(-2), true, clean)


def weighted_sum(weights: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """Compute weights @ V, (..., q, k) x (..., k, v) -> (..., q, v), over the keys in `keep`."""
    if keep is None or finite(v):
        return weights @ v
    looks = keep.to(v.dtype)
    tests = (torch.isnan, torch.isposinf, torch.isneginf)
    nan, above, below = ((looks @ test(v).to(v.dtype)) > 0 for test in tests)
    nonfinite = torch.zeros_like(above, dtype=v.dtype)
    nonfinite = nonfinite.masked_fill(above, float("inf")).masked_fill(below, float("-inf"))
    # Added instead of assigned, so that finite values keep their gradients.
    return weights @ cleaned(v) + nonfinite.masked_fill(nan | (above & below), float("nan"))


def cleaned(x: Tensor) -> Tensor:
    """Replace NaN and infinity by 0, without a gradient."""
    return torch.where(torch.isfinite(x), x, 0.0)


def finite(x: Tensor) -> bool:
    """Is every value known to be finite? While tracing, values are unknown, so the answer is no."""
    return has_values(x) and bool(torch.isfinite(x).all())
