"""For how many queries does a group of keys hold the largest weight?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .head_label import Count, is_separator


def label_counts(
    best: Tensor,
    active: Tensor,
    tokens: Sequence[str] | None,
    *,
    first: int,
    offset: int | None,
) -> list[dict[str, Count]]:
    """For each head and group, how many queries have their largest weight there, of how many.

    `best` is (H, Tq), the key of each query's largest weight, -1 if there is none; `active`, (Tq,),
    says which queries may look at anything. `first` is the first key, and `offset` is the position
    of query 0 among the keys; None if queries and keys are different texts. Induction and duplicate
    count those queries only whose token occurred before, not counting the one before them.
    """
    queries = torch.arange(best.shape[-1])
    every = active.cpu() & (best >= 0).any(0)
    holds: dict[str, tuple[Tensor, Tensor]] = {"first": (best == first, every)}
    if tokens is not None:
        separators = torch.tensor([is_separator(token) for token in tokens])
        separators[first] = False
        holds["separators"] = separators[best.clamp(min=0)] & (best >= 0), every
    if offset is not None:
        here = queries + offset
        for name, distance in (("previous", -1), ("next", 1), ("same", 0)):
            holds[name] = best == here + distance, every
        if tokens is not None and len(tokens) == len(queries):
            holds |= _repeats(best, tokens, every, first)
    return [
        {
            name: Count(int((x[h] & counted).sum()), int(counted.sum()))
            for name, (x, counted) in holds.items()
        }
        for h in range(best.shape[0])
    ]


def _repeats(
    best: Tensor, tokens: Sequence[str], every: Tensor, first: int
) -> dict[str, tuple[Tensor, Tensor]]:
    numbers: dict[str, int] = {}
    ids = torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])
    keys = torch.arange(len(tokens))
    earliest = torch.full((len(numbers),), len(tokens)).scatter_reduce(
        0, ids[first:], keys[first:], "amin"
    )
    counted = every & (earliest[ids] < keys - 1)
    key = best.clamp(min=0)
    earlier = (best > first) & (best < keys - 1)
    return {
        "duplicate": ((ids[key] == ids) & earlier, counted),
        "induction": ((ids[(key - 1).clamp(min=0)] == ids) & earlier & (key > 0), counted),
    }
