"""Functions for code around attention that work inside and outside `distributed.sharded`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from .. import engines
from ..errors import BadValue
from ..masks import dense
from ..problem.biases import bias
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistic, exact_rows
from .ambient import ambient


def must_not_be_sharded(verb: str) -> None:
    """Raise `BadValue` inside `distributed.sharded`, because `verb` needs the full sequence."""
    if ambient().ranks is not None:
        raise BadValue(
            f"{verb} was called inside distributed.sharded.",
            "in the block each rank has a part of the text, and only attention combines the parts.",
            f"call {verb} outside the block; distributed.look computes statistics of shards.",
        )


def token_positions(start: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the positions in the sequence of a layer's tokens, (count,), after `start` others."""
    if (ranks := ambient().ranks) is None:
        return torch.arange(start, start + count, dtype=dtype, device=device)
    return ranks.positions_from(start, count).to(device, dtype)


def cached_part(x: Tensor) -> Tensor:
    """Return the new keys or values that a cache stores here, from all, (..., t, D)."""
    return x if (ranks := ambient().ranks) is None else ranks.cached_part(x)


def full_output(out: Tensor) -> Tensor:
    """Return a copy of the output of all queries; without a gradient inside `sharded`."""
    return out.clone() if (ranks := ambient().ranks) is None else ranks.unshard(out.detach())


def of_all_tokens(x: Tensor) -> Tensor:
    """Return the numbers of all queries or keys, (B, H, T), from those of the ones here."""
    return x if (ranks := ambient().ranks) is None else ranks.unshard(x, 2)


def over_ranks(x: Tensor) -> Tensor:
    """Sum a tensor over the ranks; outside `sharded` return it."""
    return x if (ranks := ambient().ranks) is None else ranks.total(x)


def statistics_of(
    problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
) -> dict[str, Result]:
    """Compute statistics of a call that a listener received, over all queries and keys."""
    if (ranks := ambient().ranks) is not None:
        return ranks.statistics(problem, inputs, statistics)
    return engines.statistics_of(problem, inputs, statistics)


def rows_of(p: Problem, inputs: Inputs, queries: Tensor) -> Tensor:
    """Compute the exact weights of the queries at positions (n,) on all keys: (B, H, n, Tk)."""
    if (ranks := ambient().ranks) is not None:
        return ranks.rows(p, inputs, queries)
    every, like = slice(0, p.Tk), torch.empty((), dtype=p.wide, device=p.device)
    keep = p.key_ranges.to_bool(queries, every)
    added = None if p.bias is None else bias(p.bias.block(p.grid, queries, every, like))
    part = replace(p, Tq=len(queries), mask=dense(keep=keep), bias=added)
    requested = [exact_rows(range(len(queries)))]
    part_of = inputs._replace(q=inputs.q[:, :, queries])
    results = engines.statistics_of(part, part_of, requested)
    return cast(Tensor, results["exact_rows"])
