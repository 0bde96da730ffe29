"""Remove edges from a mask, for `knock_out`, and move masks of texts to the columns of a call.

An edge is a pair of a query and a key that it may look at. Letters as in `mask.py`.
"""

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import key_ranges
from .data import Dense, documents
from .grid import Grid
from .key_ranges import KeyRanges
from .mask import And, CachedRanges, Mask, Not, Or
from .positions import intersect, prefix
from .text_positions import PerText, Positions, Shift, per_text
from .values import Align


@dataclass(frozen=True, eq=False, repr=False)
class WithoutEdges(CachedRanges):
    """The mask `rule` without the edges that `edges` allows, for queries where `where` is True.

    `where` holds booleans (B|1, H|1, Tq|1). `words` describes the removed edges for a reader.
    """

    rule: Mask
    edges: Mask
    where: Tensor
    words: str

    def __repr__(self) -> str:
        return f"({self.rule!r}, {self.words})"

    @property
    def formula(self) -> str:
        return f"({self.rule.formula}) and not ({self.edges.formula}, for some queries)"

    def aligns(self) -> list[Align]:
        return self.rule.aligns()

    def check(self, grid: Grid) -> None:
        self.rule.check(grid)
        self.edges.check(grid)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.rule.allowed(grid, b, h, q, k) & ~self._removed(grid, b, h, q, k)

    def _removed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        where = self.where.to(q.device)
        at = tuple(i * (n > 1) for i, n in zip((b, h, q), where.shape, strict=True))
        return where[at] & self.edges.allowed(grid, b, h, q, k)

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        before = self.rule.key_ranges(grid, device)
        after = before & self.edges.key_ranges(grid, device).inverse()
        return key_ranges.choose(self.where.to(before.lo.device).unsqueeze(-1), after, before)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        cell = (torch.tensor(i) for i in (b, h, q, k))
        removed = bool(self._removed(grid, *cell))
        return self.words if removed else self.rule.reason(grid, b, h, q, k)


@dataclass(frozen=True, eq=False, repr=False)
class TextEdges(CachedRanges):
    """A mask of the positions of a text, in a call that has only some of these positions.

    Query 0 is at `start` and key 0 at `first_key` of the text. `mask` fixes its numbers of queries
    and keys, and no edge is allowed beyond them.
    """

    mask: Mask
    start: PerText
    first_key: PerText = 0

    def __repr__(self) -> str:
        return repr(self.mask)

    @property
    def formula(self) -> str:
        return self.mask.formula

    def _own(self, grid: Grid) -> Grid:
        sizes = self.mask.sizes()
        return Grid(sizes["Tq"], sizes["Tk"], grid.B, grid.H)

    def check(self, grid: Grid) -> None:
        self.mask.check(self._own(grid))

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = self._own(grid)
        q, k = q + _of_text(self.start, b), k + _of_text(self.first_key, b)
        inside = (q >= 0) & (q < own.Tq) & (k >= 0) & (k < own.Tk)
        q, k = (x.clamp(0, size - 1) for x, size in ((q, own.Tq), (k, own.Tk)))
        return inside & self.mask.allowed(own, b, h, q, k)

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        own = self._own(grid)
        full = self.mask.key_ranges(own, device)
        start, first_key = (
            torch.tensor(x, device=full.lo.device).reshape(-1, 1, 1, 1)
            for x in (self.start, self.first_key)
        )
        q = torch.arange(grid.Tq, device=full.lo.device).reshape(1, 1, -1, 1) + start
        outside = (q < 0) | (q >= own.Tq)
        lo, hi = (
            (_rows(x, q, own.Tq) - first_key).clamp(0, grid.Tk).masked_fill(outside, 0)
            for x in (full.lo, full.hi)
        )
        bits = full.bits
        if bits is not None:
            bits = _rows(bits, q, own.Tq)
            if bits.shape[-1] > 1:
                k = torch.arange(grid.Tk, device=bits.device) + first_key
                shape = torch.broadcast_shapes(bits.shape[:-1], k.shape[:-1])
                k = k.clamp(0, own.Tk - 1).expand(*shape, -1)
                bits = bits.expand(*shape, -1).gather(-1, k)
        moved = KeyRanges(lo, hi, grid.Tq, grid.Tk, bits)
        return moved & key_ranges.all_keys(grid.Tq, grid.Tk, lo.device)  # puts empty ranges last

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"{self!r}, counted from the first token of the text"


def _rows(x: Tensor, q: Tensor, Tq: int) -> Tensor:
    """Select the rows of these queries, (B|1, 1, q, 1), from (B|1, H|1, Tq|1, n)."""
    if x.shape[2] == 1:
        return x
    B = max(x.shape[0], q.shape[0])
    index = q.clamp(0, Tq - 1).expand(B, x.shape[1], -1, x.shape[3])
    return x.expand(B, -1, -1, -1).gather(2, index)


def _of_text(number: PerText, b: Tensor) -> int | Tensor:
    return torch.tensor(number, device=b.device)[b] if isinstance(number, tuple) else number


def edges_in_call(edges: Mask, grid: Grid, at: Positions) -> Mask:
    """Convert a mask over positions of texts to a mask for a call, which is `at` some positions.

    A mask that fixes T x T, or T keys, lists the positions of a text of T tokens. A mask that lists
    cells for each text of a batch counts columns of that batch. Raises `BadValue` for a mask that
    does not fit.
    """
    sizes = edges.sizes()
    if sizes.get("B", 1) not in (1, grid.B):
        edges.check(grid)
    by_column = _lists_columns(edges)
    start, first_key = (at.column, at.dropped) if by_column else (at.start, at.first_key)
    if "Tq" in sizes and "Tk" in sizes and start is not None:
        own = sizes["Tq"], sizes["Tk"]
        if (own[0] == own[1] or at.padded) and (first_key or own != (grid.Tq, grid.Tk)):
            edges = TextEdges(edges, start, first_key)
            edges.check(grid)
            return edges
    queries: PerText = 0
    if at.start is not None:
        queries = per_text(lambda start: min(max(-start, 0), grid.Tq), at.start)
        if at.start or grid.Tq != grid.Tk:  # else columns have the distances of positions
            edges = edges.with_align(per_text(operator.add, at.start, queries))
    keys = per_text(operator.neg, at.first_key)
    if queries or keys or sizes.get("Tk", grid.Tk) != grid.Tk:
        edges = edges.shifted(Shift(queries, keys, at.dropped, grid.Tk))
    before = per_text(lambda key: max(key, 0), keys)
    if before:
        edges = intersect(edges, ~prefix(before))
    edges.check(grid)
    return edges


def _lists_columns(mask: Mask) -> bool:
    """Does the mask list cells or ids for each text of a batch?"""
    if isinstance(mask, And | Or | Not):
        return any(map(_lists_columns, mask.parts))
    return isinstance(mask, Dense | documents) and "B" in mask.sizes()
