"""Masks given position by position or cell by cell: documents and dense masks."""

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
from .values import (
    as_4d,
    as_ids,
    check_batch,
    check_broadcasts,
    format_numbers,
    owned,
    to_device,
)


@dataclass(frozen=True, eq=False, repr=False)
class documents(CachedRanges):
    """Packed documents: a query may look at the keys of its own document, ids equal.

    `ids` names the document of each key, (Tk,) or (B, Tk); `queries` that of each query, and None
    means the same ids (self-attention, Tq = Tk).
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

    def _ids(self) -> tuple[Tensor, Tensor]:
        """Of queries and keys, (B|1, Tq) and (B|1, Tk)."""
        keys = cast(Tensor, self.ids)
        return keys if self.queries is None else cast(Tensor, self.queries), keys

    def sizes(self) -> dict[str, int]:
        q, k = self._ids()
        batches = _batches(q, k)
        return {"Tq": q.shape[1], "Tk": k.shape[1], **({"B": batches} if batches != 1 else {})}

    def check(self, grid: Grid) -> None:
        q, k = self._ids()
        if (q.shape[1], k.shape[1]) != (grid.Tq, grid.Tk):
            raise BadValue(
                f"documents has ids for {q.shape[1]} queries and {k.shape[1]} keys; "
                f"there are Tq={grid.Tq} queries and Tk={grid.Tk} keys.",
                "every key and every query belongs to one document.",
                "pass documents(ids_of_keys, queries=ids_of_queries).",
            )
        for ids in (q, k):
            check_batch(self, ids, grid)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        of_query, of_key = (to_device(ids, k.device) for ids in self._ids())
        first = torch.zeros_like(b)
        of_query = of_query[b if of_query.shape[0] > 1 else first, q]
        return of_query == of_key[b if of_key.shape[0] > 1 else first, k]

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        of_query, of_key = (to_device(ids, device) for ids in self._ids())
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
            for ids, i in zip(self._ids(), (q, k), strict=True)
        )
        return f"documents: query {q} is of document {of_query}, key {k} of document {of_key}"


def _batches(a: Tensor, b: Tensor) -> int:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _ranges_of_ids(of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The ranges of keys with one id, (R + 1, 2), sorted by batch and id, the last empty; and for
    each query, where the ranges of its document begin and how many they are, (B, Tq)."""
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
    """A mask given cell by cell; made by `dense(keep=...)` or `dense(drop=...)`.

    Up to 4096 cells its `repr` evaluates to the same mask; of a larger one it shows the shape.
    """

    bits: Tensor

    formula = "bits[b, h, q, k]"

    def __repr__(self) -> str:
        if self.bits.numel() > MOST_SHOWN_VALUES or not has_values(self.bits):
            return f"dense(keep=<{'x'.join(map(str, self.bits.shape))} booleans>)"
        hidden = 0 in self.bits.shape[:-1]  # a list of nothing does not say the sizes within
        shape = f", shape={tuple(self.bits.shape)}" if hidden else ""
        return f"dense(keep={self.bits.tolist()}{shape})"

    def sizes(self) -> dict[str, int]:
        names = ("B", "H", "Tq", "Tk")
        return {n: s for n, s in zip(names, as_4d(self.bits).shape, strict=True) if s != 1}

    def shifted(self, shift: Shift) -> Mask:
        """Of a mask without queries, the keys; `TextEdges` moves one that has both."""
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
    """A mask from booleans that broadcast to (B, H, Tq, Tk), with 1 to 4 dimensions.

    `keep` has True where a query may look, `drop` where it must not; give exactly one. `shape` is
    for nested lists without a cell, which do not say all of their sizes.
    Raises `BadType` for anything but booleans and for booleans without a keyword, `BadValue` if
    both or neither are given, or a shape that does not fit.
    """
    if bare is not None:
        raise BadType(
            f"dense got {kind_of(bare)} without a word.",
            "a bare boolean does not say what its True means; libraries disagree.",
            "pass dense(keep=...) if True means may look, dense(drop=...) if it means must not.",
        )
    if (keep is None) == (drop is None):
        raise BadValue(
            "dense got "
            + ("neither keep= nor drop=." if keep is None else "both keep= and drop=."),
            "a dense mask is given once, and says what its True means.",
            "pass keep= (True = may look) or drop= (True = must not look).",
        )
    word, given = ("drop", drop) if keep is None else ("keep", keep)
    try:
        bits = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
        if isinstance(given, list) and not bits.numel():  # torch makes an empty list floating
            bits = bits.bool()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadType(
            f"dense got {word}={given!r}.",
            "a dense mask is a tensor of booleans, or nested lists of one shape.",
            f"pass a boolean tensor as {word}=.",
        ) from error
    if bits.dtype != torch.bool:
        raise BadType(
            f"dense got {word}= with dtype {bits.dtype}.",
            "a dense mask holds booleans.",
            f"pass {word}=tensor.bool() for a mask of 0 and 1, or write True and False; an "
            "additive mask (0 and -inf) goes to bias=.",
        )
    must_be_strided(word, bits)
    if shape is not None:
        try:
            bits = bits.reshape(tuple(shape))
        except (TypeError, RuntimeError) as error:
            raise BadValue(
                f"dense got {bits.numel()} cells and shape={shape!r}.",
                "a shape says the sizes of the booleans, and has as many cells.",
                "pass a shape that fits, or leave it out.",
            ) from error
    if not 1 <= bits.dim() <= 4:
        raise BadValue(
            f"dense got a mask with {bits.dim()} dimensions.",
            "a dense mask broadcasts to (B, H, Tq, Tk).",
            "give it 1 to 4 dimensions.",
        )
    few = without_repeats(bits)
    return Dense(owned(~few if keep is None else few).expand(bits.shape))
