"""Define masks that are listed position by position or cell by cell: documents and dense masks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of, must_be_strided
from ..errors.limits import MOST_SHOWN_VALUES
from ..torch_state import has_values, without_repeats
from . import key_ranges
from .grid import Grid
from .key_ranges import KeyRanges
from .mask import CachedRanges, Mask
from .text_positions import Shift
from .values import as_4d, as_ids, check_batch, check_broadcasts, format_numbers, owned, to_device


@dataclass(frozen=True, eq=False, repr=False)
class documents(CachedRanges):
    """Let a query look only at the keys of its own document, with the same id.

    `ids` has the document of each key, (Tk,) or (B, Tk). `queries` has the document of each query;
    None means the same ids (self-attention, Tq = Tk).

    Raises `BadType` unless ids are whole numbers, and `BadValue` if they have other dimensions, or
    in a call of other sizes.
    """

    ids: "Tensor | Iterable[int]"
    queries: "Tensor | Iterable[int] | None" = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", as_ids(self.ids, "ids"))
        if self.queries is not None:
            object.__setattr__(self, "queries", as_ids(self.queries, "queries"))

    def __repr__(self) -> str:
        queries = "" if self.queries is None else f", queries={format_numbers(self.queries)}"
        return f"documents({format_numbers(self.ids)}{queries})"

    formula = "document[q] == document[k]"

    def ids_of_both(self) -> tuple[Tensor, Tensor]:
        """Return the ids of queries and keys, (B|1, Tq) and (B|1, Tk)."""
        keys = cast(Tensor, self.ids)
        return keys if self.queries is None else cast(Tensor, self.queries), keys

    def sizes(self) -> dict[str, int]:
        q, k = self.ids_of_both()
        batches = _batches(q, k)
        return {"Tq": q.shape[1], "Tk": k.shape[1], **({"B": batches} if batches != 1 else {})}

    def check(self, grid: Grid) -> None:
        q, k = self.ids_of_both()
        if (q.shape[1], k.shape[1]) != (grid.Tq, grid.Tk):
            have = f"documents has ids for {q.shape[1]} queries and {k.shape[1]} keys"
            rule = "every key and every query belongs to one document."
            hint = "pass documents(ids_of_keys, queries=ids_of_queries)."
            raise BadValue(f"{have}; the call has Tq={grid.Tq} and Tk={grid.Tk}.", rule, hint)
        for ids in (q, k):
            check_batch(self, ids, grid)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_query, of_key = (to_device(ids, k.device) for ids in self.ids_of_both())
        first = torch.zeros_like(b)
        of_query = of_query[b if of_query.shape[0] > 1 else first, q]
        return of_query == of_key[b if of_key.shape[0] > 1 else first, k]

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        of_query, of_key = (to_device(ids, device) for ids in self.ids_of_both())
        batches = _batches(of_query, of_key)
        of_query, of_key = of_query.expand(batches, -1), of_key.expand(batches, -1)
        if has_values(of_query, of_key):  # else the ranges cannot be counted
            ranges, first, count = _ranges_of_ids(of_query, of_key)
            most = max(int(count.max()), 1) if count.numel() else 1
            if not key_ranges.scattered(most, grid.Tk):
                column = torch.arange(most, device=device)
                used = column < count.unsqueeze(-1)
                of_each = ranges[torch.where(used, first.unsqueeze(-1) + column, -1)].unsqueeze(1)
                return KeyRanges(of_each[..., 0], of_each[..., 1], grid.Tq, grid.Tk)
        equal = of_query.unsqueeze(-1) == of_key.unsqueeze(-2)
        return key_ranges.from_bits(equal.unsqueeze(1), grid.Tq, grid.Tk)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        of_query, of_key = (
            int(ids[b if ids.shape[0] > 1 else 0, i])
            for ids, i in zip(self.ids_of_both(), (q, k), strict=True)
        )
        return f"documents: query {q} is in document {of_query}, key {k} in document {of_key}"


def _batches(a: Tensor, b: Tensor) -> int:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _ranges_of_ids(of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ranges of keys with the same id, and for each query those of its document.

    The ranges, (R + 1, 2), are sorted by batch and id; the last is empty. The ranges of a query's
    document have a first index and a count, both (B, Tq).
    """
    B, Tk = of_key.shape
    begins = torch.ones_like(of_key, dtype=torch.bool)
    begins[:, 1:] = of_key[:, 1:] != of_key[:, :-1]
    batch, lo = begins.nonzero(as_tuple=True)
    hi = lo.roll(-1)
    hi = hi.masked_fill(hi == 0, Tk)  # the next range is of another batch, which begins at 0
    ids, rank = of_key[batch, lo].unique(return_inverse=True)
    document, order = (batch * len(ids) + rank).sort(stable=True)
    ranges = torch.stack([lo, hi], -1)[order]
    before = torch.arange(B, device=of_key.device).unsqueeze(-1) * len(ids)
    of_query = of_query.contiguous()
    first = torch.searchsorted(document, before + torch.searchsorted(ids, of_query))
    end = torch.searchsorted(document, before + torch.searchsorted(ids, of_query, right=True))
    return torch.cat([ranges, ranges.new_full((1, 2), Tk)]), first, end - first


@dataclass(frozen=True, eq=False, repr=False)
class Dense(CachedRanges):
    """A mask that lists its cells; `dense(keep=...)` and `dense(drop=...)` return it.

    The `repr` of a mask with at most 4096 cells evaluates to the same mask; that of a larger mask
    shows only the shape.
    """

    bits: Tensor

    formula = "bits[b, h, q, k]"

    def __repr__(self) -> str:
        if self.bits.numel() > MOST_SHOWN_VALUES or not has_values(self.bits):
            return f"dense(keep=<{'x'.join(map(str, self.bits.shape))} booleans>)"
        hidden = 0 in self.bits.shape[:-1]  # an empty list does not show the inner sizes
        shape = f", shape={tuple(self.bits.shape)}" if hidden else ""
        return f"dense(keep={self.bits.tolist()}{shape})"

    def sizes(self) -> dict[str, int]:
        names = ("B", "H", "Tq", "Tk")
        return {n: s for n, s in zip(names, as_4d(self.bits).shape, strict=True) if s != 1}

    def shifted(self, shift: Shift) -> Mask:
        """Shift the keys of a mask without queries; `TextEdges` shifts a mask that has both."""
        bits = as_4d(self.bits)
        B, _, Tq, T = bits.shape
        first = torch.tensor(-shift.dropped if B > 1 else shift.keys).reshape(-1, 1)
        if Tq > 1 or T == 1 or (T == shift.Tk and not first.any()):
            return self
        at = (torch.arange(shift.Tk) - first).to(bits.device)[:, None, None, :]
        shape = (max(B, len(first)), bits.shape[1], 1, -1)
        taken = bits.expand(shape).gather(-1, at.clamp(0, T - 1).expand(shape))
        return Dense(taken & (at >= 0) & (at < T))

    def check(self, grid: Grid) -> None:
        check_broadcasts(
            self.bits, grid, "dense has a mask of", "a dense mask",
            "a mask per batch is (B, 1, Tq, Tk)",
        )  # fmt: skip

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        bits = as_4d(to_device(self.bits, k.device))
        cell = zip((b, h, q, k), bits.shape, strict=True)
        return bits[tuple(i if size > 1 else torch.zeros_like(i) for i, size in cell)]

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        return key_ranges.from_bits(as_4d(to_device(self.bits, device)), grid.Tq, grid.Tk)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"dense: the cell holds {self.allows(grid, b, h, q, k)}"


def dense(
    bare: object = None,
    /,
    *,
    keep: object = None,
    drop: object = None,
    shape: Sequence[int] | None = None,
) -> Dense:
    """Make a mask from booleans that broadcast to (B, H, Tq, Tk), with 1 to 4 dimensions.

    Pass either `keep`, with True where a query may look, or `drop`, with True where it must not.
    `shape` is for empty nested lists, which do not show all their sizes. Raises `BadType` for
    values that are not booleans and for booleans without a keyword, and `BadValue` for both or
    neither keyword, or for a shape that does not fit.
    """
    if bare is not None:
        rule = "a boolean mask must state what True means, because libraries disagree."
        hint = "pass dense(keep=...) if True means may look, dense(drop=...) if it means must not."
        raise BadType(f"dense got {kind_of(bare)} without a keyword.", rule, hint)
    if (keep is None) == (drop is None):
        gave = "neither keep= nor drop=" if keep is None else "both keep= and drop="
        rule = "a dense mask takes one of the two, which defines its True."
        hint = "pass keep= (True = may look) or drop= (True = must not look)."
        raise BadValue(f"dense got {gave}.", rule, hint)
    name, cells = ("drop", drop) if keep is None else ("keep", keep)
    try:
        bits = cells if isinstance(cells, Tensor) else torch.as_tensor(cells, device="cpu")
        if isinstance(cells, list) and not bits.numel():  # torch converts an empty list to float
            bits = bits.bool()
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "a dense mask is a tensor of booleans, or nested lists of one shape."
        hint = f"pass a boolean tensor as {name}=."
        raise BadType(f"dense got {name}={cells!r}.", rule, hint) from error
    if bits.dtype != torch.bool:
        gave, rule = f"dense got {name}= with dtype {bits.dtype}.", "a dense mask holds booleans."
        hint = f"pass {name}=tensor.bool() for 0 and 1, or an additive mask (0 and -inf) as bias=."
        raise BadType(gave, rule, hint)
    must_be_strided(name, bits)
    if shape is not None:
        try:
            bits = bits.reshape(tuple(shape))
        except (TypeError, RuntimeError) as error:
            gave = f"dense got {bits.numel()} cells and shape={shape!r}."
            rule = "a shape has as many cells as there are booleans."
            raise BadValue(gave, rule, "pass a shape that fits, or leave it out.") from error
    if not 1 <= bits.dim() <= 4:
        rule = "a dense mask broadcasts to (B, H, Tq, Tk)."
        hint = "pass 1 to 4 dimensions."
        raise BadValue(f"dense got a mask with {bits.dim()} dimensions.", rule, hint)
    few = without_repeats(bits)
    return Dense(owned(~few if keep is None else few).expand(bits.shape))
