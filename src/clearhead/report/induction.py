"""Weight on earlier occurrences of the query's token (duplicate-token heads), and on the tokens
after those (induction heads)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..api.hooks import active_ranks
from ..engines import compute_stats
from ..masks import dense
from ..problem.biases import bias
from ..problem.problem import Inputs, Problem
from ..stats import mass
from ..views.format import evenly

# Of more queries whose token occurred before, so many are used, evenly spaced: their mean is within
# 0.03 of the mean of all, at least 95 times in 100.
MOST = 1024
CELLS = 2**24  # of the mask and the bias that are written out for one group of queries
FEWEST = 8  # queries; a mean over fewer depends too much on the text


def repeat_shares(
    problem: Problem, inputs: Inputs, tokens: Sequence[str], first: int
) -> dict[str, Tensor]:
    """The mean weight on earlier occurrences of the query's token ("duplicate"), and on the keys
    right after those ("induction"), (H,) each, over the queries that see such keys.

    The first key, the query itself and the key before it do not count: a head may look there
    whatever the token. A mean over too few queries is NaN. Source: Olsson et al. 2022, "In-context
    Learning and Induction Heads"; Wang et al. 2022, "Interpretability in the Wild" (duplicate token
    heads).
    """
    p, keys = problem, torch.arange(problem.Tk)
    numbers: dict[str, int] = {}
    ids = torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])
    earliest = torch.full((len(numbers),), p.Tk).scatter_reduce(
        0, ids[first:], keys[first:], "amin"
    )
    repeated = (earliest[ids] < keys - 1).nonzero().flatten()
    repeated = repeated[evenly(len(repeated), MOST)]
    total = {name: torch.zeros(p.H) for name in ("induction", "duplicate")}
    count = {name: torch.zeros(p.H) for name in total}
    for positions in repeated.split(max(1, CELLS // (p.H * p.Tk))):
        queries, every = positions.to(p.device), slice(0, p.Tk)
        keep = p.key_ranges.to_bool(queries, every)
        earlier = ((keys > first) & (keys < positions.unsqueeze(-1) - 1)).to(p.device)
        same = (ids[positions].unsqueeze(-1) == ids).to(p.device)
        after_same = torch.cat([torch.zeros_like(same[:, :1]), same[:, :-1]], 1)
        cells = {"induction": after_same & earlier & keep, "duplicate": same & earlier & keep}
        ranks = active_ranks()
        found = (_masses if ranks is None else ranks.masses)(p, inputs, queries, cells)
        for name, weights in found.items():
            total[name] += weights[0].sum(-1).float().cpu()
            count[name] += cells[name][0].any(-1).sum(-1).cpu()
    return {
        name: (x / count[name]).where(count[name] >= FEWEST, math.nan) for name, x in total.items()
    }


def _masses(
    p: Problem, inputs: Inputs, queries: Tensor, cells: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weight of some queries on the keys of each group, (B, H, n)."""
    every, like = slice(0, p.Tk), torch.empty((), dtype=p.wide, device=p.device)
    keep = p.key_ranges.to_bool(queries, every)
    added = None if p.bias is None else bias(p.bias.block(p.grid, queries, every, like))
    part = replace(p, Tq=len(queries), mask=dense(keep=keep), bias=added)
    groups = mass({name: dense(keep=keep) for name, keep in cells.items()})
    found = compute_stats(part, inputs._replace(q=inputs.q[:, :, queries]), [groups]).finish()
    return cast(dict[str, Tensor], found["mass"])
