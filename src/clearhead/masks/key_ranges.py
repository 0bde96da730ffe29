"""Which keys each query reaches: a few runs [lo, hi) per query, and bits where runs cannot say it.

Every mask comes down to a `KeyRanges`, and everything that computes with masks (tiles, engines,
pictures, counts) reads a `KeyRanges`; so kernels know runs and bits, not ten kinds of mask.

`lo` and `hi` have shape (B or 1, H or 1, Tq or 1, R). The runs of a query are disjoint and sorted,
and an unused one is empty at the far end, `lo = hi = Tk`; with that, the gaps between runs are
again runs, and the three operations below are a few lines each.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_state import has_values

EVERY_KEY = 2**60  # farther than any key: a distance without a limit
MOST_EDGES = 1 << 22  # of runs, sorted at once: 100 MB
MANY = 64  # pairs of runs, beyond which bits, a byte for each key, may be the smaller way to say it


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """A query reaches a key if one of its runs holds it and `bits`, where there are any, agree."""

    lo: Tensor
    hi: Tensor
    Tq: int
    Tk: int
    bits: Tensor | None = None

    def __and__(self, other: "KeyRanges") -> "KeyRanges":
        if self.lo.shape[-1] * other.lo.shape[-1] > max(self.Tk, MANY):
            return from_bits(self.to_bool() & other.to_bool(), self.Tq, self.Tk)
        if self.bits is None or other.bits is None:
            bits = other.bits if self.bits is None else self.bits
        else:
            bits = self.bits & other.bits
        lo = torch.maximum(self.lo.unsqueeze(-1), other.lo.unsqueeze(-2)).flatten(-2)
        hi = torch.minimum(self.hi.unsqueeze(-1), other.hi.unsqueeze(-2)).flatten(-2)
        empty = lo >= hi
        lo, order = lo.masked_fill(empty, self.Tk).sort(-1)
        hi = hi.masked_fill(empty, self.Tk).gather(-1, order)
        if has_values(empty):  # else runs cannot be counted; empty ones do no harm
            used = int((~empty).sum(-1).max()) if empty.numel() else 0
            lo, hi = lo[..., : max(used, 1)], hi[..., : max(used, 1)]
        return KeyRanges(lo, hi, self.Tq, self.Tk, bits)

    def inverse(self) -> "KeyRanges":
        if self.bits is not None:
            return from_bits(~self.to_bool(), self.Tq, self.Tk)
        edge = torch.zeros_like(self.lo[..., :1])
        return all_keys(self.Tq, self.Tk, self.lo.device) & KeyRanges(
            torch.cat([edge, self.hi], -1),
            torch.cat([self.lo, edge + self.Tk], -1),
            self.Tq,
            self.Tk,
        )

    # torch.compile traces no ~ of our own classes: what may stand in a graph says `inverse()`.
    __invert__ = inverse

    def __or__(self, other: "KeyRanges") -> "KeyRanges":
        if self.bits is None and other.bits is None:
            return (self.inverse() & other.inverse()).inverse()
        return from_bits(self.to_bool() | other.to_bool(), self.Tq, self.Tk)

    def to_bool(self, queries: slice | Tensor | None = None, keys: slice | None = None) -> Tensor:
        """The mask itself for a block of queries and keys, (B|1, H|1, q, k), True = may look; None
        means all of them (torch.compile 2.10 takes no slice as a default), a tensor the queries at
        these positions."""
        queries = slice(0, self.Tq) if queries is None else queries
        keys = keys or slice(0, self.Tk)
        lo, hi = self.rows(queries)
        k = torch.arange(self.Tk, device=lo.device)[keys]
        keep = ((lo.unsqueeze(-1) <= k) & (k < hi.unsqueeze(-1))).any(-2)
        if self.bits is not None:
            keep = keep & _cut(_cut(self.bits, -2, queries), -1, keys)
        rows = torch.arange(self.Tq, device=lo.device)[queries].numel()
        return keep.expand(*keep.shape[:2], rows, k.numel())

    def rows(self, queries: slice | Tensor) -> tuple[Tensor, Tensor]:
        return _cut(self.lo, -2, queries), _cut(self.hi, -2, queries)

    def tiles(self, queries: slice, width: int) -> tuple[Tensor, Tensor]:
        """For each key tile of `width`, beside these queries: (any pair allowed, all allowed).

        Exact, in O(queries x runs + tiles); nothing of the size queries x keys is formed unless the
        mask itself holds bits of that size.
        """
        count = -(-self.Tk // width)
        if self.bits is not None:
            keep = self.to_bool(queries).flatten(0, 2)
            beyond = (0, count * width - self.Tk)  # the last tile may stand out past Tk
            some = F.pad(keep.any(0), beyond, value=False).reshape(count, width)
            full = F.pad(keep.all(0), beyond, value=True).reshape(count, width)
            return some.any(-1), full.all(-1)
        lo, hi = self.rows(queries)
        rows = lo[..., 0].numel()
        lo, hi = lo.flatten(), hi.flatten()
        touched, filled = self._spans(lo, hi, width)
        return _covered(*touched, count) > 0, _covered(*filled, count) == rows

    def _spans(self, lo: Tensor, hi: Tensor, width: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """The tiles [first, last) that each run touches, from lo // width on, and those that it
        fills, from the next edge on; the last tile ends at Tk. Runs of a query never meet, so no
        two of them fill a tile together."""
        touched = lo // width, torch.where(lo < hi, -(-hi // width), 0)
        end = torch.where(hi == self.Tk, -(-self.Tk // width), hi // width)
        return touched, (-(-lo // width), end)

    def count_tiles(self, width: int) -> tuple[int, int]:
        """How many tiles of `width` queries and keys hold a pair that is allowed, and how many hold
        no other, in every batch and head. By the ends of runs, not tile by tile."""
        strips = -(-self.Tq // width)
        if self.bits is not None:
            counts = [self._tiles_of_bits(i * width, width) for i in range(strips)]
        elif self.lo.shape[2] == 1:  # all queries alike
            counts = strips * [self._tiles_of_runs(slice(0, width), 1, width)]
        else:
            whole, runs = self.Tq // width, self.lo[:, :, :1].numel()
            each = max(1, MOST_EDGES // max(1, width * runs))
            starts = range(0, whole, each)
            parts = [(i * width, min(i + each, whole) * width, width) for i in starts]
            if whole < strips:
                parts.append((whole * width, self.Tq, self.Tq - whole * width))
            counts = [
                self._tiles_of_runs(slice(start, end), (end - start) // rows, width)
                for start, end, rows in parts
            ]
        return sum(some for some, _ in counts), sum(full for _, full in counts)

    def _tiles_of_bits(self, start: int, width: int) -> tuple[int, int]:
        some, full = self.tiles(slice(start, start + width), width)
        return int(some.sum()), int((some & full).sum())

    def _tiles_of_runs(self, queries: slice, strips: int, width: int) -> tuple[int, int]:
        """The same for so many strips of as many queries each."""
        lo, hi = (x.unflatten(2, (strips, -1)).movedim(2, 0).flatten(1) for x in self.rows(queries))
        touched, filled = self._spans(lo, hi, width)
        return _held(*touched, 1), _held(*filled, lo.shape[1] // self.lo.shape[-1])

    def tile_lists(self, queries: slice, width: int) -> tuple[list[bool], list[bool]]:
        """The same as lists. While the mask's numbers are still to come, in a graph or under vmap,
        any tile may hold a pair, and none is full for certain."""
        if has_values(self.lo, self.hi, *(() if self.bits is None else (self.bits,))):
            some, full = self.tiles(queries, width)
            return some.tolist(), full.tolist()
        count = -(-self.Tk // width)
        return [True] * count, [False] * count

    def keys_per_query(self) -> Tensor:
        """How many keys each query reaches, (B|1, H|1, Tq)."""
        if self.bits is not None:
            return self.to_bool().sum(-1)
        count = (self.hi - self.lo).clamp(min=0).sum(-1)
        return count.expand(*count.shape[:2], self.Tq)


def _held(first: Tensor, last: Tensor, least: int) -> int:
    """How many places at least so many ranges [first, last) of one row hold, all rows together;
    crossed ranges hold none."""
    ones = (first < last).long()
    edges, order = torch.cat([first, last], -1).sort(-1)
    held = torch.cat([ones, -ones], -1).gather(-1, order).cumsum(-1)[..., :-1]
    return int((edges.diff(dim=-1) * (held >= least)).sum())


def _covered(first: Tensor, last: Tensor, count: int) -> Tensor:
    """How many of the ranges [first, last) hold each of `count` places; crossed ones hold none."""
    real = first < last
    ones = torch.ones_like(first)  # what is no range begins and ends at one place
    change = torch.zeros(count + 1, dtype=torch.long, device=first.device)
    change = change.index_add(0, torch.where(real, first, 0), ones)
    return change.index_add(0, torch.where(real, last, 0), -ones).cumsum(0)[:count]


def all_keys(Tq: int, Tk: int, device: torch.device | None = None) -> KeyRanges:
    """Every query reaches every key."""
    lo = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    return KeyRanges(lo, lo + Tk, Tq, Tk)


def choose(where: Tensor, a: KeyRanges, b: KeyRanges) -> KeyRanges:
    """Those of `a` for the queries where `where` holds, (B|1, H|1, Tq|1, 1), else those of `b`."""
    if a.bits is not None or b.bits is not None:
        return from_bits(torch.where(where, a.to_bool(), b.to_bool()), a.Tq, a.Tk)
    most = max(a.lo.shape[-1], b.lo.shape[-1])

    def picked(x: Tensor, y: Tensor) -> Tensor:
        x, y = (F.pad(runs, (0, most - runs.shape[-1]), value=a.Tk) for runs in (x, y))
        return torch.where(where, x, y)

    return KeyRanges(picked(a.lo, b.lo), picked(a.hi, b.hi), a.Tq, a.Tk)


def from_bounds(lo: Tensor, hi: Tensor, Tq: int, Tk: int) -> KeyRanges:
    """One run per query, given with any bounds: cut to [0, Tk), empty if they cross."""
    lo, hi = lo.clamp(0, Tk), hi.clamp(0, Tk)
    empty = lo >= hi
    lo, hi = (x.masked_fill(empty, Tk).unsqueeze(-1) for x in (lo, hi))
    return KeyRanges(lo, hi, Tq, Tk)


def from_bits(bits: Tensor, Tq: int, Tk: int) -> KeyRanges:
    """A mask given cell by cell, (B|1, H|1, Tq|1, Tk|1) booleans: as runs if it is the same for all
    queries and not too scattered, so that nothing of the size Tq x Tk comes of it."""
    if bits.shape[-2] == 1 and Tk and bits.numel() and has_values(bits):
        runs = _runs(bits.expand(*bits.shape[:-1], Tk))
        if runs.shape[-2] <= max(8, Tk // 8):
            return KeyRanges(runs[..., 0], runs[..., 1], Tq, Tk)
    return replace(all_keys(Tq, Tk, bits.device), bits=bits)


def _runs(bits: Tensor) -> Tensor:
    """(..., Tk) booleans as (..., R, 2): where each run of True begins and ends."""
    Tk = bits.shape[-1]
    rows = F.pad(bits.reshape(-1, Tk), (1, 1))
    row, edge = (rows[:, 1:] != rows[:, :-1]).nonzero().unbind(-1)  # in order; two of each run
    edges = torch.bincount(row, minlength=len(rows))
    place = torch.arange(len(row), device=row.device) - (edges.cumsum(0) - edges)[row]
    most = max(int(edges.max()) // 2, 1)
    runs = torch.full((len(rows), 2 * most), Tk, device=bits.device)
    runs[row, place] = edge
    return runs.reshape(*bits.shape[:-1], most, 2)


def _cut(x: Tensor, dim: int, part: slice | Tensor) -> Tensor:
    """Slice a dimension, unless it has size 1 and stands for all."""
    if x.shape[dim] == 1:
        return x
    return x[..., part, :] if dim == -2 else x[..., part]
