"""Heads that look to where their token stood before: at it, or at what followed it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..matrix import ALL, Matrix
from ..problem import Inputs, Problem
from ..views.sheet import evenly

STRIP = 32  # queries whose weights are laid out at once
# Strips of a longer text are evenly spaced: as many as have 2 million weights a head (all of 1400
# tokens), and 8 at least, whose 256 queries tell a mean to a few percent.
CELLS, LEAST = 2**21, 8
FEWEST = 8  # queries, below which a mean tells of the text


def repeats(
    problem: Problem, inputs: Inputs, tokens: Sequence[str], first: int
) -> dict[str, Tensor]:
    """The mean weight on earlier places of the query's own token ("duplicate"), and on the places
    just after those ("induction"), (H,) each, over the queries that see such a place.

    The first key, the query itself and the one before it are no such places: whoever looks there
    may do so whatever the token. A kind that too few queries see is left out. Source: Olsson et al.
    2022, "In-context Learning and Induction Heads"; Wang et al. 2022, "Interpretability in the
    Wild" (duplicate token heads).
    """
    numbers: dict[str, int] = {}
    ids = torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])
    keys = torch.arange(problem.Tk)
    matrix = Matrix(problem, inputs)
    total = {name: torch.zeros(problem.H) for name in ("induction", "duplicate")}
    asked = dict.fromkeys(total, 0)
    starts = range(0, problem.Tq, STRIP)
    for i in evenly(len(starts), max(LEAST, CELLS // (STRIP * max(1, problem.Tk)))):
        queries = slice(starts[i], min(starts[i] + STRIP, problem.Tq))
        at = keys[queries].unsqueeze(-1)
        seen = (keys > first) & (keys < at - 1)
        if problem.masked:
            seen = seen & problem.reach.block(queries)[0].any(0).cpu()
        again = ids[queries].unsqueeze(-1) == ids
        after = torch.cat([torch.zeros_like(again[:, :1]), again[:, :-1]], 1)
        places = {"induction": after & seen, "duplicate": again & seen}
        if not any(bool(place.any()) for place in places.values()):
            continue
        rows = matrix.block(queries, ALL).reshape(problem.H, -1, problem.Tk)
        for name, place in places.items():
            total[name] += rows.masked_fill(~place.to(rows.device), 0.0).sum((-1, -2)).float().cpu()
            asked[name] += int(place.any(-1).sum())
    return {name: total[name] / n for name, n in asked.items() if n >= FEWEST}
