"""Accumulate the n largest logits of each query. Ties go to the lower key."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem.online_softmax import MASKED


class TopScores(NamedTuple):
    """The largest logits in falling order, and their keys, (B, H, q, n) both.

    If a query has fewer keys, the other entries are -inf and -1.
    """

    scores: Tensor
    keys: Tensor

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> "TopScores":
        return self  # logits, not relative to the maximum

    def at(self, positions: Tensor, n: int) -> "TopScores":
        """Replace key i by the i-th of these `positions`, and pad to `n` keys."""
        keys, missing = self.keys, (0, n - self.keys.shape[-1])
        if len(positions):
            keys = positions[keys.clamp(min=0)].masked_fill(keys < 0, -1)
        return TopScores(F.pad(self.scores, missing, value=MASKED), F.pad(keys, missing, value=-1))

    def merged(self, other: "TopScores") -> "TopScores":
        scores, keys = (torch.cat(pair, -1) for pair in zip(self, other, strict=True))
        return _largest(scores, keys, self.scores.shape[-1])


def top_of_tile(scores: Tensor, start: int, n: int) -> TopScores:
    """Return the top min(n, k) of a tile of logits (B, H, q, k) whose first key is `start`."""
    width = scores.shape[-1]
    with torch.no_grad():
        values, indices = scores.topk(min(n + 1, width), -1)
        if width > n:
            # torch.topk may take any of equal scores. If keys n and n + 1 have equal scores, the
            # lowest of the tied keys are selected as the n largest of -key among them.
            edge, next_one = values[..., n - 1 : n], values[..., n:]
            values, indices = values[..., :n], indices[..., :n]
            if bool(((edge == next_one) & (edge != MASKED)).any()):
                key = torch.arange(width, device=scores.device)
                tied = -torch.where(scores == edge, -key, -width).topk(n, -1).values
                above = (values > edge) | values.isnan()  # torch.topk puts NaN before all numbers
                slot = torch.arange(n, device=scores.device) - above.sum(-1, keepdim=True)
                indices = torch.where(slot < 0, indices, tied.gather(-1, slot.clamp(min=0)))
    top = scores.gather(-1, indices)
    keys = (indices + start).masked_fill(top == MASKED, -1)
    return _largest(top, keys, n)


def _largest(scores: Tensor, keys: Tensor, n: int) -> TopScores:
    """Select the n largest of a few candidates."""
    with torch.no_grad():
        by_key = keys.argsort(-1)
        falling = scores.gather(-1, by_key).argsort(dim=-1, descending=True, stable=True)
        order = by_key.gather(-1, falling)[..., :n]
    return TopScores(scores.gather(-1, order), keys.gather(-1, order))
