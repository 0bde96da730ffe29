"""Reduce masks to a few ranges of keys [lo, hi) per query, with bits where ranges do not suffice.

Everything that computes with masks (tiles, engines, pictures, counts) reads a `KeyRanges`, so
kernels implement ranges and bits instead of ten kinds of masks.

`lo` and `hi` have shape (B or 1, H or 1, Tq or 1, R). The ranges of a query are sorted, and neither
overlap nor touch. Unused ones are empty and come last, `lo = hi = Tk`, so that the gaps between
ranges are ranges again.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors.limits import ENDS_AT_ONCE
from ..torch_state import has_values, without_repeats

UNLIMITED = 2**60  # farther than any key: a distance without a limit


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """The ranges of keys for each query. Where there are `bits`, they must also allow a key."""

    lo: Tensor
    hi: Tensor
    Tq: int
    Tk: int
    bits: Tensor | None = None

    def __and__(self, other: "KeyRanges") -> "KeyRanges":
        if _many(self.lo.shape[-1] * other.lo.shape[-1], self.Tk):
            return from_bits(_cells(self) & _cells(other), self.Tq, self.Tk)
        if self.bits is None or other.bits is None:
            bits = other.bits if self.bits is None else self.bits
        else:
            bits = self.bits & other.bits
        lo = torch.maximum(self.lo.unsqueeze(-1), other.lo.unsqueeze(-2)).flatten(-2)
        hi = torch.minimum(self.hi.unsqueeze(-1), other.hi.unsqueeze(-2)).flatten(-2)
        return KeyRanges(*_in_order(lo, hi, self.Tk), self.Tq, self.Tk, bits)

    def __or__(self, other: "KeyRanges") -> "KeyRanges":
        count = self.lo.shape[-1] + other.lo.shape[-1]
        if self.bits is not None or other.bits is not None or _many(count, self.Tk):
            return from_bits(_cells(self) | _cells(other), self.Tq, self.Tk)
        shape = torch.broadcast_shapes(self.lo.shape[:3], other.lo.shape[:3])
        lo, hi = (
            torch.cat([x.expand(*shape, -1), y.expand(*shape, -1)], -1)
            for x, y in ((self.lo, other.lo), (self.hi, other.hi))
        )
        ends, depth = _depths(lo, hi)
        inside = depth > 0
        before = F.pad(inside[..., :-1], (1, 0))
        lo = ends.masked_fill(before | ~inside, self.Tk).sort(-1).values
        hi = ends.masked_fill(inside | ~before, self.Tk).sort(-1).values
        return KeyRanges(*_without_unused(lo, hi), self.Tq, self.Tk)

    def inverse(self) -> "KeyRanges":
        if self.bits is not None:
            return from_bits(~_cells(self), self.Tq, self.Tk)
        zero = torch.zeros_like(self.lo[..., :1])
        lo, hi = torch.cat([zero, self.hi], -1), torch.cat([self.lo, zero + self.Tk], -1)
        return KeyRanges(*_in_order(lo, hi, self.Tk), self.Tq, self.Tk)

    # torch.compile cannot trace ~ on this class, so code that may be compiled calls `inverse`.
    __invert__ = inverse

    def to_bool(self, queries: slice | Tensor | None = None, keys: slice | None = None) -> Tensor:
        """Return the mask for a block of queries and keys, (B|1, H|1, q, k), True = may look.

        None means all of them. A tensor has the positions of the queries.
        """
        # torch.compile 2.10 accepts no slice as a default value.
        queries = slice(0, self.Tq) if queries is None else queries
        keys = keys or slice(0, self.Tk)
        lo, hi = self.ranges_of(queries)
        k = torch.arange(self.Tk, device=lo.device)[keys]
        if lo.shape[-1] == 1:
            allowed = (lo <= k) & (k < hi)
        elif has_values(lo, hi):
            start, stop, step = keys.indices(self.Tk)
            depth = coverage(lo - start, hi - start, max(stop - start, 0), torch.int8)
            allowed = depth[..., ::step].bool()
        else:  # in a graph or under vmap, in which there are few ranges
            allowed = ((lo.unsqueeze(-1) <= k) & (k < hi.unsqueeze(-1))).any(-2)
        if self.bits is not None:
            allowed = allowed & _part(_part(self.bits, -2, queries), -1, keys)
        rows = torch.arange(self.Tq, device=lo.device)[queries].numel()
        return allowed.expand(*allowed.shape[:2], rows, k.numel())

    def ranges_of(self, queries: slice | Tensor) -> tuple[Tensor, Tensor]:
        return _part(self.lo, -2, queries), _part(self.hi, -2, queries)

    def tiles(self, queries: slice, width: int) -> tuple[Tensor, Tensor]:
        """Return (any pair allowed, all pairs allowed) for each tile of `width` keys.

        It takes O(queries x ranges + tiles) and forms no tensor of queries x keys, unless the mask
        itself has bits of that size.
        """
        count = -(-self.Tk // width)
        if self.bits is not None:
            allowed = self.to_bool(queries).flatten(0, 2)
            missing = (0, count * width - self.Tk)  # the last tile may reach beyond Tk
            some = F.pad(allowed.any(0), missing, value=False).reshape(count, width)
            full = F.pad(allowed.all(0), missing, value=True).reshape(count, width)
            return some.any(-1), full.all(-1)
        lo, hi = self.ranges_of(queries)
        rows = lo[..., 0].numel()
        touched, filled = self._tile_ranges(lo.flatten(), hi.flatten(), width)
        return coverage(*touched, count) > 0, coverage(*filled, count) == rows

    def _tile_ranges(self, lo: Tensor, hi: Tensor, width: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the tiles [first, last) that each range touches, and those that it fills.

        The last tile ends at Tk. Two ranges of a query never fill a tile together, because they do
        not touch.
        """
        touched = lo // width, torch.where(lo < hi, -(-hi // width), 0)
        end = torch.where(hi == self.Tk, -(-self.Tk // width), hi // width)
        return touched, (-(-lo // width), end)

    def tile_lists(self, queries: slice, width: int) -> tuple[list[bool], list[bool]]:
        """Return `tiles` as lists.

        In a graph or under vmap the mask has no values; then every tile may have an allowed pair,
        and none is known to be full.
        """
        if has_values(self.lo, self.hi, *(() if self.bits is None else (self.bits,))):
            some, full = self.tiles(queries, width)
            return some.tolist(), full.tolist()
        count = -(-self.Tk // width)
        return [True] * count, [False] * count

    def count_tiles(self, width: int) -> tuple[int, int]:
        """Count the square tiles of `width` with an allowed pair, and those with all pairs allowed.

        The counts are over all batches and heads. They follow from the ends of ranges, without a
        loop over tiles.
        """
        strips = -(-self.Tq // width)
        if self.bits is not None:
            tiles = (self.tiles(slice(i * width, (i + 1) * width), width) for i in range(strips))
            counts = [(int(some.sum()), int((some & full).sum())) for some, full in tiles]
        elif self.lo.shape[2] == 1:  # one row of ranges for all queries
            counts = strips * [self._count_in_ranges(slice(0, width), 1, width)]
        else:
            complete, ranges = self.Tq // width, self.lo[:, :, :1].numel()
            at_once = max(1, ENDS_AT_ONCE // max(1, width * ranges))
            starts = range(0, complete, at_once)
            parts = [(i * width, min(i + at_once, complete) * width, width) for i in starts]
            if complete < strips:
                parts.append((complete * width, self.Tq, self.Tq - complete * width))
            counts = [
                self._count_in_ranges(slice(start, end), (end - start) // rows, width)
                for start, end, rows in parts
            ]
        return sum(some for some, _ in counts), sum(full for _, full in counts)

    def _count_in_ranges(self, queries: slice, strips: int, width: int) -> tuple[int, int]:
        """Count tiles as `count_tiles` does, in `strips` strips of equally many queries."""
        lo, hi = (
            x.unflatten(2, (strips, -1)).movedim(2, 0).flatten(1) for x in self.ranges_of(queries)
        )
        touched, filled = self._tile_ranges(lo, hi, width)
        rows = lo.shape[1] // self.lo.shape[-1]
        return _count_covered(*touched, 1), _count_covered(*filled, rows)

    def keys_per_query(self) -> Tensor:
        """Count the keys that each query may look at, (B|1, H|1, Tq)."""
        if self.bits is not None:
            count = _cells(self).sum(-1)
        else:
            count = (self.hi - self.lo).clamp(min=0).sum(-1)
        return count.expand(*count.shape[:2], self.Tq)

    def keys_seen(self) -> Tensor:
        """Return which keys at least one query may look at, (B|1, H|1, Tk)."""
        if self.bits is not None:
            return _cells(self).any(-2)
        return coverage(self.lo.flatten(2), self.hi.flatten(2), self.Tk) > 0


# ----------------------------------------------------------------------------------- constructors


def all_keys(Tq: int, Tk: int, device: torch.device | None = None) -> KeyRanges:
    """Return ranges that let every query look at every key."""
    lo = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    return KeyRanges(lo, lo + Tk, Tq, Tk)


def from_bounds(
    lo: Tensor | None, hi: Tensor | None, Tq: int, Tk: int, device: torch.device | None = None
) -> KeyRanges:
    """Return one range per query from its bounds, (B|1, H|1, Tq|1); None means no limit.

    Bounds are clamped to [0, Tk], and a range is empty if its bounds cross.
    """
    if hi is None:
        if lo is None:
            return all_keys(Tq, Tk, device)
        lo = lo.clamp(0, Tk).unsqueeze(-1)  # an empty range from Tk to Tk is in order
        return KeyRanges(lo, torch.full_like(lo, Tk), Tq, Tk)
    lo = torch.zeros_like(hi) if lo is None else lo.clamp(0, Tk)
    return KeyRanges(*_in_order(lo.unsqueeze(-1), hi.clamp(0, Tk).unsqueeze(-1), Tk), Tq, Tk)


def from_bits(bits: Tensor, Tq: int, Tk: int) -> KeyRanges:
    """Return the ranges of a mask of booleans, (B|1, H|1, Tq|1, Tk|1).

    It becomes ranges if it is the same for all keys, or if it is the same for all queries and has
    few ranges. Then no tensor of the size Tq x Tk is formed later.
    """
    bits = without_repeats(bits)
    if bits.shape[-1] == 1:
        lo = torch.where(bits, 0, Tk)
        return KeyRanges(lo, torch.full_like(lo, Tk), Tq, Tk)
    if bits.shape[-2] == 1 and Tk and bits.numel() and has_values(bits):
        rows = F.pad(bits.expand(*bits.shape[:-1], Tk).reshape(-1, Tk), (1, 1))
        row, end = (rows[:, 1:] != rows[:, :-1]).nonzero().unbind(-1)  # two ends of each range
        counts = torch.bincount(row, minlength=len(rows))
        most = max(int(counts.max()), 2)
        if not scattered(most // 2, Tk):
            ends = torch.full((len(rows), most), Tk, device=bits.device)
            used = torch.arange(most, device=bits.device) < counts.unsqueeze(-1)
            ends = ends.masked_scatter(used, end).reshape(*bits.shape[:-1], most // 2, 2)
            return KeyRanges(ends[..., 0], ends[..., 1], Tq, Tk)
    everything = all_keys(Tq, Tk, bits.device)
    return KeyRanges(everything.lo, everything.hi, Tq, Tk, bits)


# -------------------------------------------------------------------------- ranges and their ends


def scattered(ranges: int, Tk: int) -> bool:
    """Do this many ranges per query take more than twice the memory of bits, a byte per key?"""
    return ranges > max(8, Tk // 8)


def _many(ranges: int, Tk: int) -> bool:
    """Are these too many ranges for a composition, which takes about four times their memory?

    Up to 64 are few for every Tk, so that a graph for any Tk needs no guard.
    """
    return ranges > max(64, Tk // 32)


def _in_order(lo: Tensor, hi: Tensor, Tk: int) -> tuple[Tensor, Tensor]:
    """Sort disjoint ranges, and move empty ones to the end as [Tk, Tk)."""
    empty = lo >= hi
    lo, hi = lo.masked_fill(empty, Tk), hi.masked_fill(empty, Tk)
    if lo.shape[-1] == 1:
        return lo, hi
    lo, order = lo.sort(-1)
    return _without_unused(lo, hi.gather(-1, order))


def _without_unused(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the last ranges if they are empty for all queries; in a graph they remain."""
    if not has_values(lo, hi):
        return lo, hi
    used = max(int((lo < hi).sum(-1).max()), 1) if lo.numel() else 1
    return lo[..., :used], hi[..., :used]


def _depths(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the ends of ranges, and count the ranges that cover the positions after each end.

    At the same position a begin comes before an end. Ranges whose bounds cross are ignored.
    """
    real = (lo < hi).long()
    ends, order = torch.cat([lo, hi], -1).sort(dim=-1, stable=True)
    return ends, torch.cat([real, -real], -1).gather(-1, order).cumsum(-1)


def _count_covered(first: Tensor, last: Tensor, least: int) -> int:
    """Count, over all rows, the positions in at least `least` ranges [first, last) of their row."""
    ends, depth = _depths(first, last)
    return int((ends.diff(dim=-1) * (depth[..., :-1] >= least)).sum())


def coverage(first: Tensor, last: Tensor, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Count, for each of `count` positions, the ranges [first, last), (..., n), that cover it.

    Ranges whose bounds cross are ignored. The sum of +1 at each begin and -1 at each end takes two
    numbers of `dtype` per position, for any number of ranges.
    """
    real = (first < last).to(dtype)
    change = first.new_zeros((*first.shape[:-1], count + 1), dtype=dtype)
    change.scatter_add_(-1, first.clamp(0, count), real)
    change.scatter_add_(-1, last.clamp(0, count), -real)
    return change.cumsum(-1, dtype=dtype)[..., :count]


def choose(where: Tensor, a: KeyRanges, b: KeyRanges) -> KeyRanges:
    """Take the ranges of `a` for queries where `where` (B|1, H|1, Tq|1, 1) is True, else of `b`."""
    if a.bits is not None or b.bits is not None:
        return from_bits(torch.where(where, _cells(a), _cells(b)), a.Tq, a.Tk)
    most = max(a.lo.shape[-1], b.lo.shape[-1])

    def picked(x: Tensor, y: Tensor) -> Tensor:
        x, y = (F.pad(ranges, (0, most - ranges.shape[-1]), value=a.Tk) for ranges in (x, y))
        return torch.where(where, x, y)

    return KeyRanges(picked(a.lo, b.lo), picked(a.hi, b.hi), a.Tq, a.Tk)


def _cells(x: KeyRanges) -> Tensor:
    """Return the mask as booleans that broadcast, (B|1, H|1, Tq|1, Tk)."""
    return without_repeats(x.to_bool())


def _part(x: Tensor, dim: int, part: slice | Tensor) -> Tensor:
    """Select queries (dim -2) or keys (dim -1); a dimension of size 1 is for all of them."""
    if x.shape[dim] == 1:
        return x
    return x[..., part, :] if dim == -2 else x[..., part]
