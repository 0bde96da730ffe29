"""Compute statistics tile by tile, in one or two sweeps over the keys.

For each tile of queries:
  1. First sweep. Each tile of scores gives a state, and the states merge.
  2. The sum of each row is final, so a weight is exp(x - max) * factor.
  3. Second sweep, if a statistic needs it. One product pools the weights over queries.
If the scores of a tile of queries fit in `STORED_CELLS`, they are stored for the second sweep;
otherwise Q K^T is computed twice. Memory stays O(tile x Tk), in training too.
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
from . import statistic
from .parse import parse_stats
from .partial import Partial

# The number of cells of a tile over all batches and heads, and bounds of its sides.
TILE_QUERIES = 256
LEAST_QUERIES = 32
LEAST_KEYS = 128
TILE_CELLS = 2**20
# Storing 64 MB of scores saves a tenth of the time: received and pooled at S = 8192, H = 8, D = 64
# took 4.2 s instead of 4.6 s on one thread.
STORED_CELLS = 2**24
ALL = slice(None)


def sweep(
    problem: Problem,
    inputs: Inputs,
    statistics: Iterable[str | statistic.Statistic],
    queries: slice = ALL,
    keys: slice = ALL,
    *,
    lse: Tensor | None = None,
) -> Partial:
    """Compute statistics of some queries on some keys, as a `Partial` that merges with others.

    With all keys in one call, it computes both sweeps, and `finish()` returns all statistics. With
    shards of keys, the weights are unknown before the first sweep of all shards:

        first = merge of sweep(problem, inputs, statistics, keys=shard)
        second = merge of sweep(problem, inputs, statistics, keys=shard, lse=first.lse)
        first.merge(second).finish()

    Only statistics whose `sweep` is "second" need the second step. `inputs` may hold all queries
    and keys of the problem, or only those of the two slices; the values are not read.

    Args:
        statistics: an argument for `parse_stats`.
        queries, keys: ranges of positions, without a step.
        lse: the log-sum-exp of these queries over all keys and the sink, (B, H, q). With it only
            the second sweep is computed, and the weights exp(x - lse) have the rounding of the lse.

    Raises:
        BadValue, BadType: statistics that do not fit the problem, a slice with a step, an lse of
            another shape.
    """
    parsed = parse_stats(statistics, problem.grid)
    if apart := [s for s in parsed if s.own_pass]:
        gave, rule = f"sweep got {apart[0]!r}.", "it has a pass of its own, over all keys."
        raise BadValue(gave, rule, "compute it with look, in one call.")
    of_queries, of_keys = _range(queries, problem.Tq, "queries"), _range(keys, problem.Tk, "keys")
    wanted = (problem.B, problem.H, len(of_queries))
    if lse is not None and tuple(lse.shape) != wanted:
        rule = f"lse has one number for each query: (B, H, q) = {wanted}."
        hint = "pass the `lse` of the merged first sweep for the same queries."
        raise BadValue(f"sweep got an lse of shape {tuple(lse.shape)}.", rule, hint)
    in_place = [s.name for s in parsed if s.name == "topk" or s.sweep == "second"]
    if in_place and problem.records_grad and in_functionalize():
        gave = f"The gradient of {', '.join(in_place)} was requested in torch.func.functionalize."
        rule = "torch does not differentiate these statistics there, which accumulate in place."
        hint = "call torch.func.grad inside functionalize, not around it."
        raise BadValue(gave, rule, hint)
    if in_place and is_batched(inputs.q, inputs.k):
        rule = "vmap cannot batch these statistics, which accumulate in place."
        hint = "pass the examples as the batch of q, k and v instead: (B, H, T, D)."
        raise BadValue(f"{', '.join(in_place)} was requested inside torch.func.vmap.", rule, hint)
    q = _cut(inputs.q, of_queries, problem.Tq, "queries")
    k = _cut(inputs.k, of_keys, problem.Tk, "keys")
    with no_autocast(problem.device):
        rows, sums = _Sweep(problem, q, k, of_queries, of_keys, parsed, lse).run()
    at, on = (torch.arange(r.start, r.stop, device=problem.device) for r in (of_queries, of_keys))
    return Partial(problem, parsed, at, on, rows, sums)


def sweep_gradients(
    problem: Problem,
    inputs: Inputs,
    statistics: statistic.Statistics,
    *,
    top: Tensor,
    rows: Sequence[Tensor | None],
    sums: Mapping[str, Tensor | None],
    learning: list[Tensor],
) -> list[Tensor | None]:
    """Backpropagate gradients of statistics that the C++ core computed to the tensors `learning`.

    `rows` and `sums` are the gradients of the tensors of a partial of all queries and keys; None
    means no gradient. Each tile of queries is recomputed, differentiated and freed. `top`
    (B, H, Tq) is the maximum of the core, a constant: that of torch may differ in the last bits.
    """
    every = range(problem.Tq), range(problem.Tk)
    sweep = _Sweep(problem, inputs.q, inputs.k, *every, statistics, None)
    create_graph = torch.is_grad_enabled()
    gradients: list[Tensor | None] = [None] * len(learning)
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
        outputs, output_gradients = zip(*pairs, strict=True)
        of_tile = torch.autograd.grad(
            outputs, learning, output_gradients, allow_unused=True, create_graph=create_graph
        )
        gradients = [add_gradients(*pair) for pair in zip(gradients, of_tile, strict=True)]
    return gradients


def add_gradients(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two gradients, where None is 0."""
    return a if b is None else b if a is None else a + b


@dataclass(frozen=True, eq=False)
class _Sweep:
    """One call of `sweep`: q (B, H, q, D) and k (B, G, k, D) have only `queries` and `keys`."""

    problem: Problem
    q: Tensor
    k: Tensor
    queries: range
    keys: range
    statistics: statistic.Statistics
    lse: Tensor | None

    @cached
    def counters(self) -> dict[str, Callable[[statistic.Tile], Accumulator]]:
        """The functions that compute the accumulators of a tile, by name."""
        first = (
            s for s in self.statistics if isinstance(s, statistic.RowStatistic) and s.accumulator
        )
        return {s.accumulator: s.counter(self.problem) for s in first}

    @cached
    def second(self) -> list[statistic.WeightStatistic]:
        """The statistics of the second sweep, which needs sums over all keys or their lse."""
        if self.lse is None and len(self.keys) < self.problem.Tk:
            return []
        return [s for s in self.statistics if isinstance(s, statistic.WeightStatistic)]

    # ---------------------------------------------------------------------------- the two sweeps

    def run(self) -> tuple[State | None, statistic.WeightSums | None]:
        """Compute all tiles of queries, concatenate their rows, and add their sums."""
        p, states = self.problem, []
        sums = statistic.empty_sums(p, self.second, slice(0, p.Tq), len(self.keys))
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
        """Return `x` with a gradient of 0 if it has none because the mask skips every tile."""
        if x.requires_grad or not self.problem.records_grad or not x.is_floating_point():
            return x
        return self.problem.with_zero_grad(x, self.q, self.k)

    def statistics_of(self, queries: slice) -> tuple[State | None, statistic.WeightSums]:
        """Compute a tile of queries over all keys, in one sweep or two."""
        p, size = self.problem, queries.stop - queries.start
        if self.lse is not None:
            # exp(x - lse) is the weight itself, so the factor is 1.
            begin = queries.start - self.queries.start
            lse = self.lse[:, :, begin : begin + size].to(p.wide)
            return None, self.sum_weights(self.scores(queries), queries, lse, torch.ones_like(lse))
        fits = p.B * p.H * size * len(self.keys) <= STORED_CELLS
        cached = list(self.scores(queries)) if self.second and fits else None
        state = statistic.empty_rows(p, self.statistics, size)
        for keys, scores in cached or self.scores(queries):
            tile = statistic.tile_of(scores, queries, keys, self.width)
            more = {name: count(tile) for name, count in self.counters.items()}
            state = merge(state, State(tile.max, tile.sum, more))
        if not self.second:
            return state, {}
        factor = statistic.finish_rows(state, p.sinks).factor
        again = cached or self.scores(queries)
        return state, self.sum_weights(again, queries, state.max.detach(), factor)

    def sum_weights(
        self, tiles: Iterable[tuple[slice, Tensor]], queries: slice, base: Tensor, factor: Tensor
    ) -> statistic.WeightSums:
        """Sum the weights exp(x - base) * factor of a tile of queries."""
        p = self.problem
        bins = max((s.query_bins(p) for s in self.second), default=1)
        first, r = statistic.bins_of(queries, p.Tq, bins)
        own_bin = statistic.bin_of(torch.arange(p.Tq, device=p.device)[queries], p.Tq, bins) - first
        members = own_bin == torch.arange(r, device=p.device).unsqueeze(-1)
        # The NaN of a query must not spread by 0 * NaN to other bins, nor to keys that are masked
        # for it. So it is put into `powers` and not into `pool`.
        all_finite = finite(factor + anchor(base))
        is_nan = torch.isnan(factor)
        pool = torch.where(members & ~is_nan.unsqueeze(-2), factor.unsqueeze(-2), 0.0)
        keep = None if all_finite else members.expand_as(pool)
        sums = statistic.empty_sums(p, self.second, queries, len(self.keys))
        for keys, scores in tiles:
            powers = exps(scores, base)
            if not all_finite:
                powers = powers.masked_fill(is_nan.unsqueeze(-1) & (scores != MASKED), math.nan)
            columns = slice(keys.start - self.keys.start, keys.stop - self.keys.start)
            tile = statistic.WeightTile(
                p, queries, keys, columns, scores, powers, factor, pool, keep
            )
            for s in self.second:
                s.add_tile(sums[s.name], tile)
        return sums

    # ---------------------------------------------------------------------------------- the tiles

    @property
    def query_tiles(self) -> list[slice]:
        return query_tiles(self.queries, self.height)

    def scores(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield (keys, logits (B, H, q, k)) for tiles that at least one query may look at."""
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
        first = (s for s in self.statistics if isinstance(s, statistic.RowStatistic))
        return max([LEAST_KEYS, *(s.least_keys(self.problem) for s in first)])

    @property
    def cells(self) -> int:
        return TILE_CELLS // max(1, self.problem.B * self.problem.H)


def _range(part: slice, size: int, name: str) -> range:
    positions = range(*part.indices(size))
    if positions.step != 1:
        rule = f"{name} are a range of positions, without a step."
        hint = "sweep each range by itself, and merge the partials."
        raise BadValue(f"sweep got {name}={part!r}.", rule, hint)
    return positions if len(positions) else range(positions.start, positions.start)


def _cut(x: Tensor, part: range, size: int, name: str) -> Tensor:
    """Select the positions of a range from a tensor that has all positions, or only these."""
    if x.shape[2] not in (size, len(part)):
        rule = f"the inputs have all {name} of the problem, or only those of the slice."
        hint = f"pass {size} or {len(part)} {name}."
        raise BadValue(f"sweep got {x.shape[2]} {name}, for {len(part)} of {size}.", rule, hint)
    return x if x.shape[2] == len(part) else x[:, :, part.start : part.stop]
