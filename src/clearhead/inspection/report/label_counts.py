"""For how many queries does a group of keys hold the largest weight?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .head_label import Count, separators
from .induction import repeat_groups, repeated, token_ids


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
    count those queries only whose token is `repeated`.
    """
    queries = torch.arange(best.shape[-1])
    every = active.cpu() & (best >= 0).any(0)
    holds: dict[str, tuple[Tensor, Tensor]] = {"first": (best == first, every)}
    if tokens is not None:
        is_separator = separators(tokens, len(tokens), first)
        holds["separators"] = is_separator[best.clamp(min=0)] & (best >= 0), every
    if offset is not None:
        here = queries + offset
        for name, distance in (("previous", -1), ("next", 1), ("same", 0)):
            holds[name] = best == here + distance, every
        if tokens is not None and len(tokens) == len(queries):
            ids = token_ids(tokens)
            counted = every & repeated(ids, first)
            groups = repeat_groups(ids, queries, best, first)
            holds |= {name: (group, counted) for name, group in groups.items()}
    return [
        {
            name: Count(int((x[h] & counted).sum()), int(counted.sum()))
            for name, (x, counted) in holds.items()
        }
        for h in range(best.shape[0])
    ]
