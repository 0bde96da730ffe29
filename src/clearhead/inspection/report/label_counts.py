"""Count the queries whose largest weight is on a group of keys."""

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
    """Count, for each head and group, the queries whose largest weight is on the group.

    Args:
        best: the key of each query's largest weight, (H, Tq); -1 if there is none.
        active: True for queries that are not fully masked, (Tq,).
        tokens: the tokens of the keys; None if unknown.
        first: the first key of the text.
        offset: the position of query 0 among the keys; None if queries and keys are different
            texts.

    Induction and duplicate count only queries whose token is `repeated`.
    """
    queries = torch.arange(best.shape[-1])
    every = active.cpu() & (best >= 0).any(0)
    hits: dict[str, tuple[Tensor, Tensor]] = {"first": (best == first, every)}
    if tokens is not None:
        is_separator = separators(tokens, len(tokens), first)
        hits["separators"] = is_separator[best.clamp(min=0)] & (best >= 0), every
    if offset is not None:
        for name, distance in (("previous", -1), ("next", 1), ("same", 0)):
            hits[name] = best == queries + offset + distance, every
        if tokens is not None and len(tokens) == len(queries):
            ids = token_ids(tokens)
            eligible = every & repeated(ids, first)
            groups = repeat_groups(ids, queries, best, first)
            hits |= {name: (group, eligible) for name, group in groups.items()}
    return [
        {
            name: Count(int((x[h] & eligible).sum()), int(eligible.sum()))
            for name, (x, eligible) in hits.items()
        }
        for h in range(best.shape[0])
    ]
