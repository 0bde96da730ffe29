"""Rules given position by position or cell by cell: documents and dense masks."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of
from ..torch_state import has_values
from . import key_ranges
from .grid import Grid
from .key_ranges import KeyRanges
from .mask import Kept, Mask
from .values import (
    MOST_SHOWN,
    as_4d,
    as_ids,
    check_batch,
    check_broadcasts,
    format_numbers,
    tensor,
    to_device,
)


@dataclass(frozen=True, eq=False, repr=False)
class documents(Kept):
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

    def _asking(self) -> Tensor:
        return tensor(self.ids if self.queries is None else self.queries)

    def sizes(self) -> dict[str, int]:
        q, k = self._asking(), tensor(self.ids)
        rows = _batches(q, k)
        return {"Tq": q.shape[1], "Tk": k.shape[1], **({"B": rows} if rows != 1 else {})}

    def check(self, grid: Grid) -> None:
        q, k = self._asking(), tensor(self.ids)
        if (q.shape[1], k.shape[1]) != (grid.Tq, grid.Tk):
            raise BadValue(
                f"documents has ids for {q.shape[1]} queries and {k.shape[1]} keys; "
                f"there are Tq={grid.Tq} queries and Tk={grid.Tk} keys.",
                "every key and every query belongs to one document.",
                "pass documents(ids_of_keys, queries=ids_of_queries).",
            )
        for names in (q, k):
            check_batch(self, names, grid)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ids, asking = to_device(tensor(self.ids), k.device), to_device(self._asking(), q.device)
        row = b if ids.shape[0] > 1 else torch.zeros_like(b)
        asking_row = b if asking.shape[0] > 1 else torch.zeros_like(b)
        return asking[asking_row, q] == ids[row, k]

    def find_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        ids, asking = to_device(tensor(self.ids), device), to_device(self._asking(), device)
        rows = _batches(ids, asking)
        ids, asking = ids.expand(rows, -1), asking.expand(rows, -1)
        if not has_values(ids, asking):  # how many runs there are depends on the ids
            return _same_document(asking, ids, grid)
        pieces = [_document_runs(a, i) for a, i in zip(asking, ids, strict=True)]
        most = max((p.shape[1] for p in pieces), default=1)
        if most > max(8, grid.Tk // 8):  # so scattered that runs would be as large as bits
            return _same_document(asking, ids, grid)
        full = torch.full((rows, 1, grid.Tq, most, 2), grid.Tk, device=device)
        for row, piece in enumerate(pieces):
            full[row, 0, :, : piece.shape[1]] = piece
        return KeyRanges(full[..., 0], full[..., 1], grid.Tq, grid.Tk)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        ids, asking = tensor(self.ids), self._asking()
        theirs = int(ids[b if ids.shape[0] > 1 else 0, k])
        ours = int(asking[b if asking.shape[0] > 1 else 0, q])
        return f"documents: query {q} is of document {ours}, key {k} of document {theirs}"


def _batches(a: Tensor, b: Tensor) -> int:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A mask given cell by cell; made by `dense(keep=...)` or `dense(drop=...)`.

    Up to 4096 cells its `repr` evaluates back; of a larger one it tells the shape.
    """

    bits: Tensor

    formula = "bits[b, h, q, k]"

    def __repr__(self) -> str:
        if self.bits.numel() > MOST_SHOWN or not has_values(self.bits):
            return f"dense(keep=<{'x'.join(map(str, self.bits.shape))} booleans>)"
        return f"dense(keep={self.bits.tolist()})"

    def sizes(self) -> dict[str, int]:
        names = ("B", "H", "Tq", "Tk")
        return {n: s for n, s in zip(names, as_4d(self.bits).shape, strict=True) if s != 1}

    def check(self, grid: Grid) -> None:
        check_broadcasts(
            self.bits, grid, "dense has a mask of", "a dense mask",
            "a mask per batch is (B, 1, Tq, Tk)",
        )  # fmt: skip

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        bits = as_4d(to_device(self.bits, k.device))
        places = (b, h, q, k)
        return bits[
            tuple(
                p if s > 1 else torch.zeros_like(p) for p, s in zip(places, bits.shape, strict=True)
            )
        ]

    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        return key_ranges.from_bits(as_4d(to_device(self.bits, device)), grid.Tq, grid.Tk)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"dense: the cell holds {self.allows(grid, b, h, q, k)}"


def dense(bare: object = None, /, *, keep: object = None, drop: object = None) -> Dense:
    """A mask from booleans that broadcast to (B, H, Tq, Tk), with 1 to 4 dimensions.

    `allowed` has True where a query may look, `drop` where it must not; give exactly one.
    Raises `BadType` for anything but booleans and for booleans without a word, `BadValue` if both
    or neither are given.
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
    if not 1 <= bits.dim() <= 4:
        raise BadValue(
            f"dense got a mask with {bits.dim()} dimensions.",
            "a dense mask broadcasts to (B, H, Tq, Tk).",
            "give it 1 to 4 dimensions.",
        )
    return Dense(~bits if keep is None else bits.clone())


def _same_document(asking: Tensor, ids: Tensor, grid: Grid) -> KeyRanges:
    same = (asking.unsqueeze(-1) == ids.unsqueeze(-2)).unsqueeze(1)
    return key_ranges.from_bits(same, grid.Tq, grid.Tk)


def _document_runs(asking: Tensor, ids: Tensor) -> Tensor:
    """For one batch: (Tq, R, 2), the runs of keys that share each query's id, sorted."""
    Tk = ids.numel()
    if not Tk:
        return ids.new_zeros(asking.numel(), 1, 2)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    lo = first.nonzero().flatten()
    hi = torch.cat([lo[1:], lo.new_tensor([Tk])])
    owner, order = ids[lo].sort(stable=True)
    lo, hi = lo[order], hi[order]
    begin = torch.searchsorted(owner, asking.contiguous())
    count = torch.searchsorted(owner, asking.contiguous(), right=True) - begin
    most = max(int(count.max()), 1) if count.numel() else 1
    place = torch.arange(most, device=ids.device)
    pick = (begin.unsqueeze(-1) + place).clamp(max=lo.numel() - 1)
    runs = torch.stack([lo[pick], hi[pick]], -1)
    return runs.masked_fill((place >= count.unsqueeze(-1)).unsqueeze(-1), Tk)
