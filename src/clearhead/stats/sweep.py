"""The pass over the tiles: the scores of one tile at a time are computed and accumulated.

For each tile of queries:
  1. First sweep. The keys pass by; each tile of scores gives sums, which merge (`state.py`).
  2. The sum of each row is final, so a weight is exp(x - max) * share.
  3. Second sweep, if a statistic needs it. The weights are pooled over queries by one product.
If the scores of a tile of queries fit in `HELD_CELLS`, the second sweep reads them again, and
Q K^T is computed once; if not, it is computed twice. Tiles the mask leaves empty are skipped, and
in full ones no mask is applied. In training a tile of queries is recomputed in the backward pass,
as in `engines/tiled.py`, so memory stays O(tile x Tk).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import BadValue
from ..problem import online_softmax
from ..problem.nan_safe import finite, weighted_sum
from ..problem.online_softmax import NOTHING
from ..problem.problem import Inputs, Problem, repeat_heads
from ..torch_state import in_transform, is_batched, no_autocast
from .buffers import Buffers
from .parse import parse_stats
from .partial import Partial
from .state import RowStats, WeightSums, exps, finish_rows, largest_of_tile, merge_rows, moved
from .statistics import Statistic, bin_of

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

        first = merge of sweep(problem, inputs, wanted, keys=shard)
        second = merge of sweep(problem, inputs, wanted, keys=shard, lse=first.lse)
        first.merge(second).finish()

    The second step is only for statistics whose `sweep` is "second". `inputs` may hold all queries
    and keys of the problem, or only those of the two slices; the values are not read.

    Args:
        wanted: what `parse_stats` reads.
        queries, keys: runs of positions, without a step.
        lse: (B, H, q) for these queries, from all keys and the sink: make the second sweep only.
            Weights are then exp(x - lse), and carry the rounding of the lse.

    Raises:
        BadValue, BadType: statistics that do not fit the question, a slice with a step, an lse of
            another shape.
    """
    parsed = parse_stats(statistics, problem.grid)
    rows_of, columns = _run(queries, problem.Tq, "queries"), _run(keys, problem.Tk, "keys")
    if lse is not None and tuple(lse.shape) != (problem.B, problem.H, len(rows_of)):
        raise BadValue(
            f"sweep got an lse of shape {tuple(lse.shape)}.",
            f"there is one for each of the queries: (B, H, q) = "
            f"{(problem.B, problem.H, len(rows_of))}.",
            "pass the `lse` of the merged first sweep for the same queries.",
        )
    added = [s.name for s in parsed if s.name == "topk" or s.sweep == "second"]
    if added and is_batched(inputs.q, inputs.k):
        raise BadValue(
            f"{', '.join(added)} was asked for inside of torch.func.vmap.",
            "these are accumulated in place, tile by tile, which vmap cannot batch.",
            "give the examples as the batch of q, k and v instead: (B, H, T, D).",
        )
    sweep = _Sweep(
        problem,
        _cut(inputs.q, rows_of, problem.Tq, "queries"),
        _cut(inputs.k, columns, problem.Tk, "keys"),
        rows_of,
        columns,
        Buffers(problem, parsed),
        lse,
    )
    with no_autocast(problem.device):
        first, second = sweep.run()
    at, on = (torch.arange(r.start, r.stop, device=problem.device) for r in (rows_of, columns))
    return Partial(problem, parsed, at, on, first, second)


def sweep_gradients(
    problem: Problem,
    inputs: Inputs,
    statistics: tuple[Statistic, ...],
    *,
    top: Tensor,
    rows: RowStats,
    sums: WeightSums,
    learning: list[Tensor],
) -> list[Tensor | None]:
    """The gradients of `learning`, given those of the `rows` and `sums` of a partial of everything,
    which somebody else counted; None is what has no gradient.

    Each strip of queries is counted, differentiated and let go. `top` (B, H, Tq), a constant, is
    the maximum that the given rows are relative to: another in its last bits than torch finds.
    """
    every = range(problem.Tq), range(problem.Tk)
    sweep = _Sweep(problem, inputs.q, inputs.k, *every, Buffers(problem, statistics), None)
    again = torch.is_grad_enabled()
    learned: list[Tensor | None] = [None] * len(learning)
    for tile in sweep.strips():
        with no_autocast(problem.device), torch.enable_grad():
            counted, summed = sweep.strip(tile)
            assert counted is not None
            results = (
                *moved(counted, online_softmax.anchor(top[:, :, tile])),
                *(summed or WeightSums()),
            )
        size = tile.stop - tile.start
        of_rows = (None if g is None else g.narrow(2, tile.start, size) for g in rows)
        given = *of_rows, *sweep.part(sums, tile)
        pairs = [
            (x, g)
            for x, g in zip(results, given, strict=True)
            if x is not None and g is not None and x.requires_grad
        ]
        if not pairs:
            continue
        outputs, towards = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs, learning, towards, allow_unused=True, create_graph=again
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
    buffers: Buffers
    lse: Tensor | None

    @cached_property
    def second(self) -> bool:
        """A second sweep needs sums over all keys, or their lse; given that, it is the only one."""
        whole = len(self.keys) == self.problem.Tk
        return self.lse is not None or (whole and self.buffers.weights)

    # ---------------------------------------------------------------------------- the two sweeps

    def run(self) -> tuple[RowStats | None, WeightSums | None]:
        """Tile of queries by tile of queries: rows are joined, sums are added."""
        parts = [self.buffers.no_rows(0)]
        sums = self.buffers.no_sums(len(self.keys)) if self.second else None
        for tile in self.strips():
            # A checkpoint does not work under torch.func.
            if self.problem.records_grad and not in_transform():
                rows_of, sums_of = checkpoint(
                    self.strip, tile, use_reentrant=False, preserve_rng_state=False
                )
            else:
                rows_of, sums_of = self.strip(tile)
            if rows_of is not None:
                parts.append(rows_of)
            if sums is not None and sums_of is not None:
                self.add(sums, sums_of, tile)
        if sums is not None:
            sums = WeightSums(*map(self.with_zero_grad, sums))
        if self.lse is not None:
            return None, sums
        columns = zip(*parts, strict=True)
        joined = (None if column[0] is None else torch.cat(column, 2) for column in columns)
        return RowStats(*map(self.with_zero_grad, joined)), sums  # type: ignore[arg-type]  # None is not requested

    def with_zero_grad(self, x: Tensor | None) -> Tensor | None:
        """`x`, made to require a gradient (of 0) if the mask skipped every tile."""
        if (
            x is None
            or x.requires_grad
            or not self.problem.records_grad
            or not x.is_floating_point()
        ):
            return x
        bias = None if self.problem.bias is None else self.problem.bias.numbers
        learning = (y for y in (self.q, self.k, self.problem.sinks, bias) if y is not None)
        return x + sum(y.flatten()[:0].sum() for y in learning)

    def strips(self) -> Iterator[slice]:
        for start in range(self.queries.start, self.queries.stop, self.height):
            yield slice(start, min(start + self.height, self.queries.stop))

    def strip(self, queries: slice) -> tuple[RowStats | None, WeightSums | None]:
        """A tile of queries beside all the keys, in one sweep or two."""
        p, size = self.problem, queries.stop - queries.start
        if self.lse is not None:
            # exp(x - lse) is the weight itself, so its share is 1.
            begin = queries.start - self.queries.start
            lse = self.lse[:, :, begin : begin + size].to(p.wide)
            return None, self.sum_up(self.tiles(queries), queries, lse, torch.ones_like(lse))
        fits = p.B * p.H * size * len(self.keys) <= HELD_CELLS
        cached = list(self.tiles(queries)) if self.second and fits else None
        row_stats = self.buffers.no_rows(size)
        inside = [ranges.tile_lists(queries, self.width) for ranges in self.buffers.groups]
        for keys, scores in cached or self.tiles(queries):
            row_stats = merge_rows(row_stats, self.count(scores, queries, keys, inside))
        if not self.second:
            return row_stats, None
        share = finish_rows(row_stats, p.sinks).share
        again = cached or self.tiles(queries)
        return row_stats, self.sum_up(again, queries, row_stats.max.detach(), share)

    def count(
        self,
        scores: Tensor,
        queries: slice,
        keys: slice,
        inside: list[tuple[list[bool], list[bool]]],
    ) -> RowStats:
        """The row statistics of one tile of scores (B, H, q, k)."""
        top = scores.amax(-1)
        powers, below = exps(scores, top.detach())
        total = powers.sum(-1)
        moment = torch.einsum("bhqk,bhqk->bhq", powers, below) if self.buffers.moment else None
        masses = best = where = None
        if self.buffers.groups:
            tile, each = keys.start // self.width, []
            for ranges, (some, full) in zip(self.buffers.groups, inside, strict=True):
                if full[tile]:
                    each.append(total)
                elif some[tile]:
                    each.append((powers * ranges.to_bool(queries, keys)).sum(-1))
                else:
                    each.append(torch.zeros_like(total))
            masses = torch.stack(each, -1)
        if self.buffers.best:
            best, where = largest_of_tile(scores, keys.start, self.buffers.best)
        return RowStats(top, total, moment, masses, best, where)

    def sum_up(
        self, tiles: Iterable[tuple[slice, Tensor]], queries: slice, base: Tensor, share: Tensor
    ) -> WeightSums:
        """The weights exp(x - base) * share of a tile of queries, added up.

        One product pools over the queries: `pool` (B, H, r, q) holds, for each of r bins, the
        shares of the queries in it, so pool @ exp(x - base) sums the weights of each bin.
        """
        p = self.problem
        buffers, bins = self.buffers, self.buffers.bins
        first, r = buffers.bins_of(queries)
        exact_here = [(buffers.exact or [])[n] - queries.start for n in buffers.exact_in(queries)]
        sums = buffers.no_sums(len(self.keys), r, len(exact_here))
        at = torch.arange(p.Tq, device=p.device)[queries]
        own = torch.zeros_like(at) if bins is None else bin_of(at, p.Tq, bins[0]) - first
        member = own == torch.arange(r, device=p.device).unsqueeze(-1)
        # A query whose row is NaN must not reach, through 0 * NaN, the bins it is no member of, nor
        # the keys it does not see. Its NaN stands in `powers`, where it looks, and not in `pool`.
        all_finite = finite(share + online_softmax.anchor(base))
        is_nan = torch.isnan(share)
        pool = torch.where(member & ~is_nan.unsqueeze(-2), share.unsqueeze(-2), 0.0)
        keep = None if all_finite else member.expand_as(pool)
        for keys, scores in tiles:
            powers, _ = exps(scores, base)
            if not all_finite:
                powers = powers.masked_fill(is_nan.unsqueeze(-1) & (scores != NOTHING), math.nan)
            here = slice(keys.start - self.keys.start, keys.stop - self.keys.start)
            if sums.rows is not None:
                exact = powers[:, :, exact_here] * share[:, :, exact_here].unsqueeze(-1)
                blocked = scores[:, :, exact_here] == NOTHING
                sums.rows[..., here] = exact if all_finite else exact.masked_fill(blocked, 0.0)
            if sums.received is None and sums.map is None:
                continue
            pooled = weighted_sum(pool, powers, keep)
            if sums.received is not None:
                sums.received[..., here] = pooled.sum(2)
            if sums.map is not None:
                assert bins is not None
                on = bin_of(torch.arange(p.Tk, device=p.device)[keys], p.Tk, bins[1])
                lo, hi = int(on[0]), int(on[-1]) + 1
                into = (on.unsqueeze(-1) == torch.arange(lo, hi, device=p.device)).to(pooled)
                if all_finite:
                    sums.map[..., lo:hi] += pooled @ into
                else:
                    sums.map[..., lo:hi] += weighted_sum(into.T, pooled.mT, into.T > 0).mT
        return sums

    def add(self, total: WeightSums, part: WeightSums, queries: slice) -> None:
        """Put what a tile of queries gave in its place."""
        first, r = self.buffers.bins_of(queries)
        if total.received is not None and part.received is not None:
            total.received.add_(part.received)
        if total.map is not None and part.map is not None:
            total.map[:, :, first : first + r] += part.map
        if total.rows is not None and part.rows is not None:
            here = self.buffers.exact_in(queries)
            if here:
                total.rows[:, :, here] = part.rows

    def part(self, total: WeightSums, queries: slice) -> WeightSums:
        """What `add` put there of a tile of queries."""
        first, r = self.buffers.bins_of(queries)
        return WeightSums(
            total.received,
            None if total.map is None else total.map.narrow(2, first, r),
            None if total.rows is None else total.rows[:, :, self.buffers.exact_in(queries)],
        )

    # ---------------------------------------------------------------------------------- the tiles

    def tiles(self, queries: slice) -> Iterator[tuple[slice, Tensor]]:
        """The key tiles that any of these queries may look at: (keys, logits (B, H, q, k))."""
        p = self.problem
        begin = queries.start - self.queries.start
        q = self.q[:, :, begin : begin + queries.stop - queries.start].to(p.wide)
        some, full = p.key_ranges.tile_lists(queries, self.width)
        for tile in (i for i, any_pair in enumerate(some) if any_pair):
            lo = max(tile * self.width, self.keys.start)
            hi = min((tile + 1) * self.width, self.keys.stop)
            if lo < hi:
                k = self.k[:, :, lo - self.keys.start : hi - self.keys.start].to(p.wide)
                question = p.unmasked if full[tile] else p
                keys = slice(lo, hi)
                yield keys, question.logits(q, repeat_heads(k, p.H), queries, keys)[0]

    @cached_property
    def height(self) -> int:
        return min(TILE_QUERIES, max(LEAST_QUERIES, self.cells // self.least_keys))

    @cached_property
    def width(self) -> int:
        return max(self.least_keys, self.cells // self.height)

    @property
    def least_keys(self) -> int:
        # torch.topk sorts in part, 5 to 10 times faster, where a row is 64 times what is taken.
        return max(LEAST_KEYS, 128 * self.buffers.best)

    @property
    def cells(self) -> int:
        return TILE_CELLS // max(1, self.problem.B * self.problem.H)


def _run(part: slice, size: int, name: str) -> range:
    run = range(*part.indices(size))
    if run.step != 1:
        raise BadValue(
            f"sweep got {name}={part!r}.",
            f"{name} are a run of positions, without a step.",
            "sweep each range by itself, and merge the partials.",
        )
    return run if len(run) else range(run.start, run.start)


def _cut(x: Tensor, part: range, size: int, name: str) -> Tensor:
    """The positions of a run, from a tensor that holds all of them, or only these."""
    if x.shape[2] not in (size, len(part)):
        raise BadValue(
            f"sweep got {x.shape[2]} {name}, for {len(part)} of {size}.",
            f"the inputs hold all {name} of the problem, or only those of the slice.",
            f"pass {size} or {len(part)} of them.",
        )
    return x if x.shape[2] == len(part) else x[:, :, part.start : part.stop]
