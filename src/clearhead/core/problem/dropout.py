"""Decide which weights dropout drops: with a seed, by a hash of (seed, b, h, q, k).

A random draw depends on the order of the cells, so two engines, tilings or shards would drop
different cells. A hash of the indices is the same in every engine. It uses 32-bit arithmetic, so
the C++ core computes one cell per lane. Its last step is that of MurmurHash3 (Austin Appleby,
public domain).

Without a seed torch's generator draws: up to `FEW_WEIGHTS` weights one by one, as `nn.Dropout`
does, or a seed for the C++ core.
"""

import torch
from torch import Tensor

from ..errors.limits import MOST_SEED

FEW_WEIGHTS = 2**16  # weights, over all batches and heads

_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """Draw a seed, (1,), from torch's generator of the device, which `torch.manual_seed` sets."""
    return torch.randint(MOST_SEED, (1,), device=device)


def keep_mask(seed: int, p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return which weights survive, for index tensors `b, h, q, k` that broadcast together.

    A cell survives if its 32-bit hash is at least p * 2^32, so with probability 1 - p.
    """
    key = _mix(_mix(torch.zeros_like(b), seed & _WORD), (seed >> 32) & _WORD)
    for index in (b, h, q, k):
        key = _mix(key, index)
    return key >= round(p * 2**32)


def factors(
    seed: int, p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute the factors of dropout, (b, h, q, k): `keep_factor`, or 0 for dropped weights.

    The indices `b, h, q, k` have one dimension each.
    """
    survives = keep_mask(seed, p, b.reshape(-1, 1, 1, 1), h.reshape(-1, 1, 1), q.unsqueeze(-1), k)
    return survives.to(dtype) * keep_factor(p)


def keep_factor(p: float) -> float:
    """Return 1 / (1 - p), which keeps the expectation of a weight; finite for p = 1."""
    return 1 / max(1.0 - p, 1e-30)


def _mix(key: Tensor, word: Tensor | int) -> Tensor:
    """Mix `word` into a 32-bit `key` in int64, one round of the hash."""
    x = (key ^ ((word * 0x9E3779B1 + 0x7F4A7C15) & _WORD)) & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)
