"""What code around attention does in the same way inside and outside of `distributed.sharded`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..engines import compute_stats
from ..errors import BadValue
from ..masks import dense
from ..problem.biases import bias
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistic, mass
from .ambient import ambient


def must_not_be_sharded(verb: str) -> None:
    """Raises `BadValue` inside `distributed.sharded`: `verb` needs the whole sequence."""
    if ambient().ranks is not None:
        raise BadValue(
            f"{verb} was called inside of distributed.sharded.",
            "there a rank holds a part of the text, and only attention is answered by all of them.",
            f"call {verb} outside of it; distributed.look gives statistics of shards.",
        )


def token_positions(start: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where the tokens of a layer's call stand in the sequence, (count,), after `start` others."""
    if (ranks := ambient().ranks) is None:
        return torch.arange(start, start + count, dtype=dtype, device=device)
    return ranks.positions_from(start, count).to(device, dtype)


def cached_part(x: Tensor) -> Tensor:
    """Of keys or values of new tokens, (..., t, D), those that a cache here keeps."""
    ranks = ambient().ranks
    return x if ranks is None else ranks.cached_part(x)


def full_output(out: Tensor) -> Tensor:
    """A copy of the output of a call, of all queries; of many ranks without a gradient."""
    ranks = ambient().ranks
    return out.clone() if ranks is None else ranks.unshard(out.detach())


def statistics_of(
    problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
) -> dict[str, Result]:
    """Statistics of a call that a listener was given, all queries on all keys."""
    if (ranks := ambient().ranks) is not None:
        return ranks.statistics(problem, inputs, statistics)
    return compute_stats(problem, inputs, statistics).finish()


def masses_of(
    p: Problem, inputs: Inputs, queries: Tensor, cells: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weight of the queries at some positions, (n,), on groups of keys that differ from query
    to query: `cells` are (..., n, Tk), and the result (B, H, n)."""
    if (ranks := ambient().ranks) is not None:
        return ranks.masses(p, inputs, queries, cells)
    every, like = slice(0, p.Tk), torch.empty((), dtype=p.wide, device=p.device)
    keep = p.key_ranges.to_bool(queries, every)
    added = None if p.bias is None else bias(p.bias.block(p.grid, queries, every, like))
    part = replace(p, Tq=len(queries), mask=dense(keep=keep), bias=added)
    groups = mass({name: dense(keep=keep) for name, keep in cells.items()})
    found = compute_stats(part, inputs._replace(q=inputs.q[:, :, queries]), [groups]).finish()
    return cast(dict[str, Tensor], found["mass"])
