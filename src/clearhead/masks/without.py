"""A rule without some of its edges: what `knock_out` makes of a model's mask.

An edge is a pair of query and key that may look. Letters as in `mask.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import key_ranges
from .grid import Grid
from .key_ranges import KeyRanges
from .mask import CachedRanges, Mask
from .values import Align


@dataclass(frozen=True, eq=False, repr=False)
class Without(CachedRanges):
    """`rule` without the edges that `edges` allows, for the queries where `where` holds.

    `where` is (B|1, H|1, Tq|1) booleans. `words` says what was removed, for a reader.
    """

    rule: Mask
    edges: Mask
    where: Tensor
    words: str

    def __repr__(self) -> str:
        return f"({self.rule!r}, {self.words})"

    @property
    def formula(self) -> str:
        return f"({self.rule.formula}) and not ({self.edges.formula}, for the queries named)"

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
class Placed(CachedRanges):
    """The edges of a mask of T x T, about a text of T tokens, in a call of which query 0 stands at
    `start` (one number, or one per batch): a step of generation. Beyond the text it allows none."""

    mask: Mask
    start: int | Tensor

    def __repr__(self) -> str:
        return repr(self.mask)

    @property
    def formula(self) -> str:
        return self.mask.formula

    def _own(self, grid: Grid) -> Grid:
        T = self.mask.sizes()["Tk"]
        return Grid(T, T, grid.B, grid.H)

    def check(self, grid: Grid) -> None:
        self.mask.check(self._own(grid))

    def _queries(self, grid: Grid, device: torch.device | None) -> Tensor:
        """The positions of the queries in the text, (B|1, Tq)."""
        first = self.start
        column = first.to(device).reshape(-1, 1) if isinstance(first, Tensor) else first
        return torch.arange(grid.Tq, device=device).reshape(1, -1) + column

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own, queries = self._own(grid), self._queries(grid, q.device)
        q = queries[b if queries.shape[0] > 1 else torch.zeros_like(b), q]
        inside = (q >= 0) & (q < own.Tq) & (k < own.Tk)
        at = (x.clamp(0, own.Tk - 1) for x in (q, k))
        return inside & self.mask.allowed(own, b, h, *at)

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        own, Tk = self._own(grid), grid.Tk
        full = self.mask.key_ranges(own, device)
        q = self._queries(grid, full.lo.device)
        outside = ((q < 0) | (q >= own.Tq))[:, None, :, None]
        at = q.clamp(0, own.Tq - 1)[:, None, :, None]

        def cut(x: Tensor) -> Tensor:
            """The rows of the queries of this call."""
            B, rows = max(x.shape[0], at.shape[0]), max(1, own.Tq if x.shape[2] > 1 else 1)
            index = at.expand(B, x.shape[1], -1, x.shape[3])
            return x.expand(B, -1, own.Tq, -1).gather(2, index) if rows > 1 else x

        lo, hi = cut(full.lo), cut(full.hi).clamp(max=Tk)
        empty = (lo >= hi) | outside
        bits = full.bits
        if bits is not None:
            bits = cut(bits)
            bits = F.pad(bits, (0, Tk - bits.shape[-1])) if bits.shape[-1] > 1 else bits
        return KeyRanges(lo.masked_fill(empty, Tk), hi.masked_fill(empty, Tk), grid.Tq, Tk, bits)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"{self!r}, of the text from its first token on"


@dataclass(frozen=True, eq=False, repr=False)
class Kept(CachedRanges):
    """The edges of a mask over a text, in a call whose cache has dropped the first `dropped` keys
    of it."""

    mask: Mask
    dropped: int

    def __repr__(self) -> str:
        return repr(self.mask)

    @property
    def formula(self) -> str:
        return self.mask.formula

    def check(self, grid: Grid) -> None:
        self.mask.check(_with_dropped(grid, self.dropped))

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.mask.allowed(_with_dropped(grid, self.dropped), b, h, q, k + self.dropped)

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        full = self.mask.key_ranges(_with_dropped(grid, self.dropped), device)
        lo, hi = ((x - self.dropped).clamp(min=0) for x in (full.lo, full.hi))
        bits = full.bits
        if bits is not None and bits.shape[-1] > 1:
            bits = bits[..., self.dropped :]
        kept = KeyRanges(lo, hi, grid.Tq, grid.Tk, bits)
        return kept & key_ranges.all_keys(grid.Tq, grid.Tk, lo.device)  # puts empty ranges last

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return self.mask.reason(_with_dropped(grid, self.dropped), b, h, q, k + self.dropped)


def _with_dropped(grid: Grid, dropped: int) -> Grid:
    return grid._replace(Tk=grid.Tk + dropped)


def placed(edges: Mask, grid: Grid, start: int | Tensor | None, dropped: int = 0) -> Mask:
    """The edges as a call of these sizes sees them, where query 0 stands at `start` in the text
    (None: the call does not say) and key 0 at `dropped`. A mask that fixes T x T is about a text of
    T tokens, position by position.

    Raises `BadValue` for a mask that fits neither.
    """
    if dropped:
        return Kept(placed(edges, _with_dropped(grid, dropped), start), dropped)
    sizes = edges.sizes()
    T = sizes.get("Tk")
    square = T is not None and sizes.get("Tq", T) == T and "Tq" in sizes
    if square and (grid.Tq, grid.Tk) != (T, T) and start is not None:
        edges = Placed(edges, start)
    elif start is not None and (isinstance(start, Tensor) or start or grid.Tq != grid.Tk):
        edges = edges.with_align(start)
    edges.check(grid)
    return edges
