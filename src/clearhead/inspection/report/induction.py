"""Weight on earlier occurrences of the query's token (duplicate-token heads), and on the tokens
after those (induction heads). A head's share of weight and the count of its queries
(`label_counts.py`) both ask `repeat_groups`, so they speak of the same keys."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors.limits import LEAST_REPEAT_QUERIES, MOST_REPEAT_QUERIES, REPEAT_CELLS
from ...formatting import evenly
from ...functional.sharding import masses_of
from ...problem.problem import Inputs, Problem


def token_ids(tokens: Sequence[str]) -> Tensor:
    """A number for each token, (T,); the same token has the same number.

    >>> token_ids(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])


def repeated(ids: Tensor, first: int) -> Tensor:
    """Which tokens occurred before, (T,): at the key `first` or later, and not as the token just
    before.

    >>> repeated(token_ids("a b b a a".split()), 0).tolist()
    [False, False, False, True, True]
    """
    T = len(ids)
    keys = torch.arange(T)
    earliest = torch.full((T,), T).scatter_reduce(0, ids[first:], keys[first:], "amin")
    return earliest[ids] < keys - 1


def repeat_groups(ids: Tensor, queries: Tensor, keys: Tensor, first: int) -> dict[str, Tensor]:
    """Is the key right after an earlier occurrence of the query's token ("induction"), or is it one
    ("duplicate")? `queries` and `keys` are positions that broadcast; a key of -1 is none.

    The key `first`, the query itself and the key before it do not count: a head may look there
    whatever the token.
    """
    counts = (keys > first) & (keys < queries - 1)
    return {
        "induction": (ids[(keys - 1).clamp(min=0)] == ids[queries]) & counts,
        "duplicate": (ids[keys.clamp(min=0)] == ids[queries]) & counts,
    }


def repeat_shares(
    problem: Problem, inputs: Inputs, tokens: Sequence[str], first: int
) -> dict[str, Tensor]:
    """The mean weight on earlier occurrences of the query's token ("duplicate"), and on the keys
    right after those ("induction"), (H,) each, over the queries that see such keys.

    `repeat_groups` says which keys these are. A mean over too few queries is NaN. Source: Olsson et
    al. 2022, "In-context Learning and Induction Heads"; Wang et al. 2022, "Interpretability in the
    Wild" (duplicate token heads).
    """
    p, ids = problem, token_ids(tokens)
    asked = repeated(ids, first).nonzero().flatten()
    asked = asked[evenly(len(asked), MOST_REPEAT_QUERIES)].to(p.device)
    ids, keys = ids.to(p.device), torch.arange(p.Tk, device=p.device)
    total = {name: torch.zeros(p.H) for name in ("induction", "duplicate")}
    count = {name: torch.zeros(p.H) for name in total}
    for queries in asked.split(max(1, REPEAT_CELLS // (p.H * p.Tk))):
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
