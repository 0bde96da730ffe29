"""Measure the weight on earlier occurrences of the query's token, and on the tokens after those.

The first marks duplicate-token heads, the second induction heads. Weights and counts of queries
(`label_counts.py`) both use `repeat_groups`, so they refer to the same keys.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors.limits import LEAST_REPEAT_QUERIES, MOST_REPEAT_QUERIES, REPEAT_CELLS
from ...formatting import evenly
from ...functional.sharding import masses_of
from ...problem.problem import Inputs, Problem


def token_ids(tokens: Sequence[str]) -> Tensor:
    """Return a number for each token, (T,); equal tokens have equal numbers. A `Token` is compared
    by its id.

    >>> token_ids(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[object, int] = {}
    names = (getattr(token, "id", token) for token in tokens)
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def repeated(ids: Tensor, first: int) -> Tensor:
    """Return booleans for the tokens that occurred before, (T,).

    Occurrences count from the key `first` on, except the token just before.

    >>> repeated(token_ids("a b b a a".split()), 0).tolist()
    [False, False, False, True, True]
    """
    T = len(ids)
    keys = torch.arange(T)
    earliest = torch.full((T,), T).scatter_reduce(0, ids[first:], keys[first:], "amin")
    return earliest[ids] < keys - 1


def repeat_groups(ids: Tensor, queries: Tensor, keys: Tensor, first: int) -> dict[str, Tensor]:
    """Return booleans for the keys of the groups "induction" and "duplicate".

    A key is in "duplicate" if it is an earlier occurrence of the query's token, and in "induction"
    if it is right after one. `queries` and `keys` are positions that broadcast; a key of -1 means
    none. The key `first`, the query itself and the key before it do not count, because heads look
    there for other reasons.
    """
    counts = (keys > first) & (keys < queries - 1)
    return {
        "induction": (ids[(keys - 1).clamp(min=0)] == ids[queries]) & counts,
        "duplicate": (ids[keys.clamp(min=0)] == ids[queries]) & counts,
    }


def repeat_shares(
    problem: Problem, inputs: Inputs, tokens: Sequence[str], first: int
) -> dict[str, Tensor]:
    """Return the mean weight on each of the `repeat_groups`, (H,).

    The mean is over the queries that may look at such keys; over too few queries it is NaN. Source:
    Olsson et al. 2022, "In-context Learning and Induction Heads"; Wang et al. 2022,
    "Interpretability in the Wild" (duplicate token heads).
    """
    p, ids = problem, token_ids(tokens)
    sampled = repeated(ids, first).nonzero().flatten()
    sampled = sampled[evenly(len(sampled), MOST_REPEAT_QUERIES)].to(p.device)
    ids, keys = ids.to(p.device), torch.arange(p.Tk, device=p.device)
    total = {name: torch.zeros(p.H) for name in ("induction", "duplicate")}
    count = {name: torch.zeros(p.H) for name in total}
    for queries in sampled.split(max(1, REPEAT_CELLS // (p.H * p.Tk))):
        keep = p.key_ranges.to_bool(queries, slice(0, p.Tk))
        groups = repeat_groups(ids, queries.unsqueeze(-1), keys, first)
        cells = {name: group & keep for name, group in groups.items()}
        for name, weights in masses_of(p, inputs, queries, cells).items():
            total[name] += weights[0].sum(-1).float().cpu()
            count[name] += cells[name][0].any(-1).sum(-1).cpu()
    return {
        name: (x / count[name]).where(count[name] >= LEAST_REPEAT_QUERIES, math.nan)
        for name, x in total.items()
    }
