"""Restrict a mask to some queries and some keys, without storing anything of the size Tq x Tk.

A rank holds its positions in increasing order. So keys that are a range of absolute positions are
also a range of the shard. Every mask is reduced to such ranges; an end of a range in the shard is
the number of the shard's keys before it.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..core.masks import Grid, Mask
from ..core.masks.key_ranges import UNLIMITED, KeyRanges, all_keys
from ..core.masks.mask import CachedRanges, Unchanged
from ..core.problem.problem import Problem
from .layouts import Layout, Positions


@dataclass(frozen=True, eq=False, repr=False)
class Cut(CachedRanges):
    """A mask restricted to queries and keys at some positions, and some heads, of a larger problem.

    The number of heads is that of the call.
    """

    mask: Mask
    grid: Grid
    queries: Positions
    keys: Positions
    first_head: int = 0

    def __repr__(self) -> str:
        return f"{self.mask!r} cut to {len(self.queries)} queries and {len(self.keys)} keys"

    @cached_property
    def problems(self) -> dict[object, Problem]:
        """The problems of calls with this mask, which have the arguments of kernels."""
        return {}

    @property
    def formula(self) -> str:
        return self.mask.formula

    def check(self, grid: Grid) -> None:
        assert (grid.Tq, grid.Tk) == (len(self.queries), len(self.keys))

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        queries, keys = self.queries.tensor(q.device), self.keys.tensor(k.device)
        return self.mask.allowed(self.grid, b, h + self.first_head, queries[q], keys[k])

    def band(self, grid: Grid) -> tuple[int, int] | None:
        band = self.mask.band(self.grid)
        if band is None or not (self.queries.contiguous and self.keys.contiguous):
            return None
        (before, after), shift = band, self.queries.start - self.keys.start
        return (
            UNLIMITED if before == UNLIMITED else before - shift,
            UNLIMITED if after == UNLIMITED else after + shift,
        )

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        Tq, Tk = len(self.queries), len(self.keys)
        queries, bits = self.queries.tensor(device), None
        if (band := self.mask.band(self.grid)) is not None:
            before, after = band
            at = queries.reshape(1, 1, -1, 1)
            lo, hi = at - before, at + after + 1
        else:
            ranges = self.mask.key_ranges(self.grid, device)
            lo, hi = ranges.ranges_of(queries)
            if ranges.bits is not None:
                bits = ranges.bits if ranges.bits.shape[2] == 1 else ranges.bits[:, :, queries]
                bits = bits if bits.shape[3] == 1 else self.keys.cut(bits, 3)
        heads = slice(self.first_head, self.first_head + grid.H)
        lo, hi = (x if x.shape[1] == 1 else x[:, heads] for x in map(self.keys.before, (lo, hi)))
        if bits is not None and bits.shape[1] > 1:
            bits = bits[:, heads]
        return KeyRanges(lo, hi, Tq, Tk, bits) & all_keys(Tq, Tk, lo.device)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        at, on = int(self.queries.tensor()[q]), int(self.keys.tensor()[k])
        return self.mask.reason(self.grid, b, h + self.first_head, at, on)


@dataclass(frozen=True, eq=False)
class Routes:
    """What one rank computes, sends and receives under a mask.

    `received[s]` are the positions of the keys of rank s that this rank's queries may look at.
    `sent[r]` are the positions of this rank's keys that the queries of rank r may look at.
    """

    mask: Mask
    grid: Grid
    rank: int
    queries: Layout
    keys: Layout
    received: list[Positions]
    sent: list[Positions]

    @property
    def world(self) -> int:
        return self.keys.world

    @cached_property
    def cuts(self) -> list[Cut]:
        """The mask restricted to this rank's queries and the keys received from each rank."""
        return [
            Cut(self.mask, self.grid, self.queries.positions[self.rank], w) for w in self.received
        ]


def routes(mask: Mask, grid: Grid, queries: Layout, keys: Layout, rank: int) -> Routes:
    """Return the routes of a rank, computed once for a mask, a size and a pair of layouts."""
    return _routes(Unchanged(mask), grid, queries, keys, rank)


@lru_cache(maxsize=4)  # the layers of a model use one mask
def _routes(of: Unchanged, grid: Grid, queries: Layout, keys: Layout, rank: int) -> Routes:
    mask = of.mask
    owners = range(keys.world)
    received = [
        seen(mask, grid, queries.positions[rank], keys.positions[owner]) for owner in owners
    ]
    sent = [seen(mask, grid, queries.positions[other], keys.positions[rank]) for other in owners]
    return Routes(mask, grid, rank, queries, keys, received, sent)


def count_received(
    mask: Mask, grid: Grid, queries: Layout, keys: Layout, rank: int
) -> tuple[list[int], int]:
    """Count the keys of each rank that the queries of one rank may look at, and the pairs over all
    batches and heads. These are the counts of `routes`, in time independent of the other ranks."""
    cut = Cut(mask, grid, queries.positions[rank], Positions.of([range(grid.Tk)]))
    ranges = cut.key_ranges(grid._replace(Tq=len(cut.queries)), torch.device("cpu"))
    first, last = _joined(ranges)
    size = last - first
    upto = size.cumsum(0) - size  # keys that are reached before each run

    def reached_before(at: Tensor) -> Tensor:
        run = torch.searchsorted(first, at, right=True) - 1
        reached = upto[run] + torch.minimum(at - first[run], size[run])
        return torch.where(run < 0, 0, reached)

    counts = torch.zeros(keys.world, dtype=torch.long, device="cpu")
    if len(first):
        owner, start, stop = keys.ends
        counts.index_add_(0, owner, reached_before(stop) - reached_before(start))
    pairs = ranges.keys_per_query().expand(grid.B, grid.H, len(cut.queries)).sum()
    return counts.tolist(), int(pairs)


def _joined(ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """Return the ranges of keys that any query sees, in order: (n,) starts and (n,) ends."""
    if ranges.bits is not None:
        some, _ = ranges.tiles(slice(0, ranges.Tq), 1)
        runs = Positions.listed(some.nonzero().flatten()).ranges
        ends = torch.tensor([(r.start, r.stop) for r in runs], device="cpu").long().reshape(-1, 2)
        return ends[:, 0].contiguous(), ends[:, 1].contiguous()
    lo, hi = ranges.ranges_of(slice(0, ranges.Tq))
    lo, hi = lo[lo < hi], hi[lo < hi]
    if not len(lo):
        return lo, hi
    lo, order = lo.sort()
    furthest = hi[order].cummax(0).values
    begins = torch.nn.functional.pad(lo[1:] > furthest[:-1], (1, 0), value=True)
    return lo[begins], furthest[torch.nn.functional.pad(begins[1:], (0, 1), value=True)]


def seen(mask: Mask, grid: Grid, queries: Positions, keys: Positions) -> Positions:
    """Return the positions of the keys that any of the queries may look at, in any batch or
    head."""
    if not len(queries) or not len(keys):
        return Positions(())
    cut = Cut(mask, grid, queries, keys)
    some, _ = cut.key_ranges(grid, torch.device("cpu")).tiles(slice(0, len(queries)), 1)
    if bool(some.all()):
        return keys
    return Positions.listed(keys.tensor()[some])
