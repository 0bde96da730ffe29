"""Heads that look to where their token stood before: at it, or at what followed it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..engines import compute_stats
from ..masks import dense
from ..problem.biases import bias
from ..problem.problem import Inputs, Problem
from ..stats import mass
from ..views.panels import evenly

# Of more queries whose token stood before, so many are asked, evenly spaced: their mean is that of
# all to within 3 percent, 95 times in 100 at the least.
MOST = 1024
CELLS = 2**24  # of a mask or a bias that is written out for the queries asked at once
FEWEST = 8  # queries, below which a mean tells of the text


def repeats(
    problem: Problem, inputs: Inputs, tokens: Sequence[str], first: int
) -> dict[str, Tensor]:
    """The mean weight on earlier places of the query's own token ("duplicate"), and on the places
    just after those ("induction"), (H,) each, over the queries that see such a place.

    The first key, the query itself and the one before it are no such places: whoever looks there
    may do so whatever the token. A mean over too few queries is NaN. Source: Olsson et al. 2022,
    "In-context Learning and Induction Heads"; Wang et al. 2022, "Interpretability in the Wild"
    (duplicate token heads).
    """
    p, keys = problem, torch.arange(problem.Tk)
    numbers: dict[str, int] = {}
    ids = torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])
    earliest = torch.full((len(numbers),), p.Tk).scatter_reduce(
        0, ids[first:], keys[first:], "amin"
    )
    stood = (earliest[ids] < keys - 1).nonzero().flatten()
    stood = stood[evenly(len(stood), MOST)]
    total = {name: torch.zeros(p.H) for name in ("induction", "duplicate")}
    asked = {name: torch.zeros(p.H) for name in total}
    for at in stood.split(max(1, CELLS // (p.H * p.Tk))):
        seen = ((keys > first) & (keys < at.unsqueeze(-1) - 1)).to(p.device)
        here, every = at.to(p.device), slice(0, p.Tk)
        keep = p.key_ranges.to_bool(here, every)
        again = (ids[at].unsqueeze(-1) == ids).to(p.device)
        after = torch.cat([torch.zeros_like(again[:, :1]), again[:, :-1]], 1)
        places = {"induction": after & seen & keep, "duplicate": again & seen & keep}
        like = torch.empty((), dtype=p.wide, device=p.device)
        added = None if p.bias is None else bias(p.bias.block(p.grid, here, every, like))
        part = replace(p, Tq=len(at), mask=dense(keep=keep), bias=added)
        groups = mass({name: dense(keep=place) for name, place in places.items()})
        counted = compute_stats(part, inputs._replace(q=inputs.q[:, :, here]), [groups]).finish()
        for name, weights in cast(dict[str, Tensor], counted["mass"]).items():
            total[name] += weights[0].sum(-1).float().cpu()
            asked[name] += places[name][0].any(-1).sum(-1).cpu()
    return {
        name: (x / asked[name]).where(asked[name] >= FEWEST, math.nan) for name, x in total.items()
    }
