"""Which weights are dropped: with a seed, a function of (seed, b, h, q, k) and of nothing else.

A random draw depends on the order in which cells are visited, so two engines, two tilings or two
shards would drop different cells. A hash of the cell's place does not: every engine computes the
same answer for the same cell. 32-bit arithmetic throughout, so the C++ core does it in one lane.
The finaliser is that of MurmurHash3 (Austin Appleby, public domain).

Without a seed torch's generator decides. So few weights as a lesson has are drawn one by one, as
`nn.Dropout` would; where there are more, the C++ core asks it for a seed.
"""

import torch
from torch import Tensor

from ..errors.limits import MOST_SEED

FEW_WEIGHTS = 2**16  # weights, over all batches and heads

_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """A seed, (1,), from torch's generator of the device: `torch.manual_seed` decides it."""
    return torch.randint(MOST_SEED, (1,), device=device)


def keep_mask(seed: int, p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """True where the weight survives. `b, h, q, k` are index tensors that broadcast together.

    A cell survives if its 32-bit hash is at least p * 2^32, so with probability 1 - p.
    """
    key = _mix(_mix(torch.zeros_like(b), seed & _WORD), (seed >> 32) & _WORD)
    for place in (b, h, q, k):
        key = _mix(key, place)
    return key >= round(p * 2**32)


def factors(
    seed: int, p: float, b: Tensor, h: Tensor, q: Tensor, k: Tensor, dtype: torch.dtype
) -> Tensor:
    """What dropout multiplies weights by, (b, h, q, k): `keep_factor` where a weight survives, else
    0. The places `b, h, q, k` have one dimension each."""
    survives = keep_mask(seed, p, b.reshape(-1, 1, 1, 1), h.reshape(-1, 1, 1), q.unsqueeze(-1), k)
    return survives.to(dtype) * keep_factor(p)


def keep_factor(p: float) -> float:
    """1 / (1 - p), so that the expectation of a weight stays; finite for p = 1, which drops all."""
    return 1 / max(1.0 - p, 1e-30)


def _mix(key: Tensor, word: Tensor | int) -> Tensor:
    """One round: stir `word` into a 32-bit `key` held in int64."""
    x = (key ^ ((word * 0x9E3779B1 + 0x7F4A7C15) & _WORD)) & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)
