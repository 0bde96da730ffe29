"""The sweep over the tiles: the scores of one tile at a time are computed and accumulated.

For each tile of queries:
  1. First sweep. The keys pass by; each tile of scores gives a state, and the states merge.
  2. The sum of each row is final, so a weight is exp(x - max) * share.
  3. Second sweep, if a statistic needs it. The weights are pooled over queries by one product.
If the scores of a tile of queries fit in `HELD_CELLS`, the second sweep reads them again, and
Q K^T is computed once; if not, it is computed twice. Memory stays O(tile x Tk), in training too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadValue
from ..problem.nan_safe import finite
from ..problem.online_softmax import MASKED, Accumulator, State, anchor, exps, merge, moved
from ..problem.problem import Inputs, Problem, cached
from ..problem.tiles import for_queries, key_tiles, query_tiles
from ..torch_state import in_functionalize, is_batched, no_autocast
from .parse import parse_stats
from .partial import Partial
from .statistic import (
    RowStatistic,
    Statistic,
    Tile,
    WeightStatistic,
    WeightSums,
    WeightTile,
    bin_of,
    bins_of,
    empty_rows,
    empty_sums,
    finish_rows,
    tile_of,
)

# Cells of a tile over all batches and heads, and the bounds within which its sides are chosen.
TILE_QUERIES = 256
LEAST_QUERIES = 32
LEAST_KEYS = 128
TILE_CELLS = 2**20
# Holding 64 MB of scores saves a tenth: received + map at S = 8192, H = 8, D = 64 took 4.2 s so and
# 4.6 s without (causal 1.8 and 2.1), of processor time on one thread.
HELD_CELLS = 2**24
ALL = slice(None)


def sweep(
    problem: Problem,
    inputs: Inputs,
    statistics: Iterable[str | Statistic],
    queries: slice = ALL,
    keys: slice = ALL,
    *,
    lse: Tensor | None = None,
) -> Partial:
    """The statistics of some queries on some keys, as a `Partial` that merges with others.

    With all keys in one call, both sweeps are made and `finish()` gives everything. Where the keys
    come in shards, no shard knows the weights before all have been seen, so there are two steps:

        first = merge of sweep(problem, inputs, statistics, keys=shard)
        second = merge of sweep(problem, inputs, statistics, keys=shard, lse=first.lse)
        first.merge(second).finish()

    The second step is only for statistics whose `sweep` is "second". `inputs` may hold all queries
    and keys of the problem, or only those of the two slices; the values are not read.

    Args:
        statistics: what `parse_stats` reads.
        queries, keys: ranges of positions, without a step.
        lse: (B, H, q) for these queries, from all keys and the sink: make the second sweep only.
            Weights are then exp(x - lse), and carry the rounding of the lse.

    Raises:
        BadValue, BadType: statistics that do not fit the problem, a slice with a step, an lse of
            another shape.
    """
    parsed = parse_stats(statistics, problem.grid)
    of_queries, of_keys = _range(queries, problem.Tq, "queries"), _range(keys, problem.Tk, "keys")
    if lse is not None and tuple(lse.shape) != (problem.B, problem.H, len(of_queries)):
        raise BadValue(
            f"sweep got an lse of shape {tuple(lse.shape)}.",
            f"there is one for each of the queries: (B, H, q) = "
            f"{(problem.B, problem.H, len(of_queries))}.",
            "pass the `lse` of the merged first sweep for the same queries.",
        )
    in_place = [s.name for s in parsed if s.name == "topk" or s.sweep == "second"]
    if in_place and problem.records_grad and in_functionalize():
        raise BadValue(
            f"A gradient of {', '.join(in_place)} was asked for through torch.func.functionalize.",
            "these are accumulated in place, tile by tile, and torch differentiates no copy of it.",
            "call torch.func.grad inside of functionalize, not around it.",
        )
    if in_place and is_batched(inputs.q, inputs.k):
        raise BadValue(
            f"{', '.join(in_place)} was asked for inside of torch.func.vmap.",
            "these are accumulated in place, tile by tile, which vmap cannot batch.",
            "give the examples as the batch of q, k and v instead: (B, H, T, D).",
        )
    q = _cut(inputs.q, of_queries, problem.Tq, "queries")
    k = _cut(inputs.k, of_keys, problem.Tk, "keys")
    with no_autocast(problem.device):
        rows, sums = _Sweep(problem, q, k, of_queries, of_keys, parsed, lse).run()
    at, on = (torch.arange(r.start, r.stop, device=problem.device) for r in (of_queries, of_keys))
    return Partial(problem, parsed, at, on, rows, sums)


def sweep_gradients(
    problem: Problem,
    inputs: Inputs,
    statistics: tuple[Statistic, ...],
    *,
    top: Tensor,
    rows: Sequence[Tensor | None],
    sums: Mapping[str, Tensor | None],
    learning: list[Tensor],
) -> list[Tensor | None]:
    """The gradients of `learning`, given those of the tensors of `rows` and of `sums`, a partial of
    everything that the C++ core computed; None means no gradient.

    Each tile of queries is computed, differentiated and freed. `top` (B, H, Tq), a constant, is the
    maximum that the given rows are relative to: that of torch may differ in the last bits.
    """
    every = range(problem.Tq), range(problem.Tk)
    sweep = _Sweep(problem, inputs.q, inputs.k, *every, statistics, None)
    create_graph = torch.is_grad_enabled()
    learned: list[Tensor | None] = [None] * len(learning)
    for tile in sweep.query_tiles:
        with no_autocast(problem.device), torch.enable_grad():
            state, weight_sums = sweep.statistics_of(tile)
            assert state is not None
            results = moved(state, anchor(top[:, :, tile])).tensors() + list(weight_sums.values())
        # `narrow`, because batched gradients have no rule for a slice of all queries.
        size = tile.stop - tile.start
        grads = [None if g is None else g.narrow(2, tile.start, size) for g in rows]
        for s in sweep.second:
            total = sums.get(s.name)
            grads.append(None if total is None else s.part(total, problem, tile))
        pairs = [
            (x, g) for x, g in zip(results, grads, strict=True) if g is not None and x.requires_grad
        ]
        if not pairs:
            continue
        outputs, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs, learning, given, allow_unused=True, create_graph=create_graph
        )
        learned = [both(*pair) for pair in zip(learned, found, strict=True)]
    return learned


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which None is nothing."""
    return a if b is None else b if a is None else a + b


@dataclass(frozen=True, eq=False)
class _Sweep:
    """One call of `sweep`: q is (B, H, q, D) and k (B, G, k, D), of `queries` and `keys` only."""

    problem: Problem
    q: Tensor
    k: Tensor
    queries: range
    keys: range
    statistics: tuple[Statistic, ...]
    lse: Tensor | None

    @cached
    def counters(self) -> dict[str, Callable[[Tile], Accumulator]]:
        """What the first sweep accumulates beside max and sum: the function of a tile, by name."""
        first = (s for s in self.statistics if isinstance(s, RowStatistic) and s.accumulator)
        return {s.accumulator: s.counter(self.problem) for s in first}

    @cached
    def second(self) -> list[WeightStatistic]:
        """The statistics of the second sweep. It needs sums over all keys, or their lse."""
        if self.lse is None and len(self.keys) < self.problem.Tk:
            return []
        return [s for s in self.statistics if isinstance(s, WeightStatistic)]

    # ---------------------------------------------------------------------------- the two sweeps

    def run(self) -> tuple[State | None, WeightSums | None]:
        """Tile of queries by tile of queries: rows are joined, sums are added."""
        p, states = self.problem, []
        sums = empty_sums(p, self.second, slice(0, p.Tq), len(self.keys))
        for tile in self.query_tiles:
            state, weight_sums = for_queries(p, tile, self.statistics_of)
            if state is not None:
                states.append(state)
            for s in self.second:
                s.add_part(sums[s.name], weight_sums[s.name], p, tile)
        sums = {name: self.with_zero_grad(x) for name, x in sums.items()}
        if not states:  # with `lse` given, there is no first sweep
            return None, sums
        first, *others = states
        joined = first.map(lambda *parts: self.with_zero_grad(torch.cat(parts, 2)), *others)
        return joined, sums or None

    def with_zero_grad(self, x: Tensor) -> Tensor:
        """`x`, made to require a gradient (of 0) if the mask skipped every tile."""
        if x.requires_grad or not self.problem.records_grad or not x.is_floating_point():
            return x
        return self.problem.with_zero_grad(x, self.q, self.k)

    def statistics_of(self, queries: slice) -> tuple[State | None, WeightSums]:
        """A tile of queries beside all the keys, in one sweep or two."""
        p, size = self.problem, queries.stop - queries.start
        if self.lse is not None:
            # exp(x - lse) is the weight itself, so its share is 1.
            begin = queries.start - self.queries.start
            lse = self.lse[:, :, begin : begin + size].to(p.wide)
            return None, self.sum_weights(self.scores(queries), queries, lse, torch.ones_like(lse))
        fits = p.B * p.H * size * len(self.keys) <= HELD_CELLS
        cached = list(self.scores(queries)) if self.second and fits else None
        state = empty_rows(p, self.statistics, size)
        for keys, scores in cached or self.scores(queries):
            tile = tile_of(scores, queries, keys, self.width)
            more = {name: count(tile) for name, count in self.counters.items()}
            state = merge(state, State(tile.max, tile.sum, more))
        if not self.second:
            return state, {}
        share = finish_rows(state, p.sinks).share
        again = cached or self.scores(queries)
        return state, self.sum_weights(again, queries, state.max.detach(), share)

    def sum_weights(
        self, tiles: Iterable[tuple[slice, Tensor]], queries: slice, base: Tensor, share: Tensor
    ) -> WeightSums:
        """The weights exp(x - base) * share of a tile of queries, added up."""
        p = self.problem
        bins = max((s.query_bins(p) for s in self.second), default=1)
        first, r = bins_of(queries, p.Tq, bins)
        own_bin = bin_of(torch.arange(p.Tq, device=p.device)[queries], p.Tq, bins) - first
        members = own_bin == torch.arange(r, device=p.device).unsqueeze(-1)
        # A query whose row is NaN must not reach, through 0 * NaN, the bins it is no member of, nor
        # the keys that are masked for it. So its NaN goes into `powers`, and not into `pool`.
        all_finite = finite(share + anchor(base))
        is_nan = torch.isnan(share)
        pool = torch.where(members & ~is_nan.unsqueeze(-2), share.unsqueeze(-2), 0.0)
        keep = None if all_finite else members.expand_as(pool)
        sums = empty_sums(p, self.second, queries, len(self.keys))
        for keys, scores in tiles:
            powers = exps(scores, base)
            if not all_finite:
                powers = powers.masked_fill(is_nan.unsqueeze(-1) & (scores != MASKED), math.nan)
            columns = slice(keys.start - self.keys.start, keys.stop - self.keys.start)
            tile = WeightTile(p, queries, keys, columns, scores, powers, share, pool, keep)
            for s in self.second:
                s.add_tile(sums[s.name], tile)
        return sums

    # ---------------------------------------------------------------------------------- the tiles

    @property
    def query_tiles(self) -> list[slice]:
        return query_tiles(self.queries, self.height)

    def scores(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """The key tiles that any of these queries may look at: (keys, logits (B, H, q, k))."""
        p, begin = self.problem, self.queries.start
        q = self.q[:, :, queries.start - begin : queries.stop - begin].to(p.wide)
        for keys, tile_problem in key_tiles(p, queries, self.width, self.keys):
            k = self.k[:, :, keys.start - self.keys.start : keys.stop - self.keys.start]
            yield keys, tile_problem.logits(q, k, queries, keys)[0]

    @cached
    def height(self) -> int:
        return min(TILE_QUERIES, max(LEAST_QUERIES, self.cells // self.least_keys))

    @cached
    def width(self) -> int:
        return max(self.least_keys, self.cells // self.height)

    @cached
    def least_keys(self) -> int:
        first = (s for s in self.statistics if isinstance(s, RowStatistic))
        return max([LEAST_KEYS, *(s.least_keys(self.problem) for s in first)])

    @property
    def cells(self) -> int:
        return TILE_CELLS // max(1, self.problem.B * self.problem.H)


def _range(part: slice, size: int, name: str) -> range:
    found = range(*part.indices(size))
    if found.step != 1:
        raise BadValue(
            f"sweep got {name}={part!r}.",
            f"{name} are a range of positions, without a step.",
            "sweep each range by itself, and merge the partials.",
        )
    return found if len(found) else range(found.start, found.start)


def _cut(x: Tensor, part: range, size: int, name: str) -> Tensor:
    """The positions of a range, from a tensor that holds all of them, or only these."""
    if x.shape[2] not in (size, len(part)):
        raise BadValue(
            f"sweep got {x.shape[2]} {name}, for {len(part)} of {size}.",
            f"the inputs hold all {name} of the problem, or only those of the slice.",
            f"pass {size} or {len(part)} of them.",
        )
    return x if x.shape[2] == len(part) else x[:, :, part.start : part.stop]
