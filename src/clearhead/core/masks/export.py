"""Export masks to booleans, additive masks, FlexAttention and pictures.

`Mask` inherits these methods, which use only `allowed`, `key_ranges`, `check` and `sizes` of it.

torch's own `create_block_mask` evaluates the rule for every pair, in memory of Tq x Tk. The ends of
key ranges suffice to find the blocks that they touch and fill, in O(Tq x ranges + blocks).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from .grid import Grid, make_grid
from .key_ranges import KeyRanges, coverage

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CPU = torch.device("cpu")  # for printed text, also under another default device


class Exports(ABC):
    """A rule over positions that can be exported."""

    @abstractmethod
    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return booleans: may query q look at key k, in text b and head h?

        The four index tensors broadcast together.
        """

    @abstractmethod
    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        """Return the rule as ranges of keys per query, with bits where ranges do not suffice."""

    @abstractmethod
    def check(self, grid: Grid) -> None:
        """Raise `BadValue` if the rule has no meaning for these sizes."""

    def must_fit(self, grid: Grid) -> None:  # noqa: B027 (most rules hold for any position)
        """Raise `BadValue` if the rule counts positions that a call of these sizes does not have.

        It is not a part of `check`, because a picture or a watched call may have fewer positions.
        """

    def sizes(self) -> dict[str, int]:
        """Return the sizes that the rule itself fixes, by "B", "H", "Tq" and "Tk"."""
        return {}

    def to_bool(
        self, Tq: int | None = None, Tk: int | None = None, *, B: int | None = None,
        H: int | None = None, device: torch.device | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mask as booleans, True = may look.

        The shape is (Tq, Tk), or (B, H or 1, Tq, Tk) if the mask differs between batches or heads.
        None means the size that the mask fixes itself; else `Tk=None` means Tk = Tq.
        """
        grid = make_grid(self, Tq, Tk, B, H)
        allowed = self.key_ranges(grid, device).to_bool()
        return allowed[0, 0] if allowed.shape[:2] == (1, 1) else allowed

    def to_additive(
        self, Tq: int | None = None, Tk: int | None = None, *, B: int | None = None,
        H: int | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the mask to add to scores: 0 where allowed, -inf where not. Sizes as in `to_bool`.

        Raises `BadType` for a dtype without -inf.
        """
        if not dtype.is_floating_point:
            rule = "an additive mask holds 0 and -inf, which are floating-point numbers."
            hint = "pass a floating dtype; to_bool() returns booleans."
            raise BadType(f"to_additive got dtype={dtype}.", rule, hint)
        allowed = self.to_bool(Tq, Tk, B=B, H=H, device=device)
        zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return zeros.masked_fill(~allowed, float("-inf"))

    def to_flex(
        self, Tq: int | None = None, Tk: int | None = None, *, B: int | None = None,
        H: int | None = None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
        """Return the mask as a `mask_mod(b, h, q, k)` for FlexAttention. Sizes as in `to_bool`."""
        grid = make_grid(self, Tq, Tk, B, H)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.allowed(grid, b, h, q, k)

        return mask_mod

    def to_block_mask(
        self, Tq: int | None = None, Tk: int | None = None, *, B: int | None = None,
        H: int | None = None, device: torch.device | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> "BlockMask":  # fmt: skip
        """Return the mask as a `BlockMask` for torch's FlexAttention.

        It takes O(Tq + blocks) memory, where torch's `create_block_mask` takes Tq x Tk. Sizes are
        as in `to_bool`; `block_size` is one number, or (queries, keys). Raises `BadValue` for a
        block size below 1.
        """
        pair = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        sides = [whole_number(side) for side in pair]
        if len(sides) != 2 or any(side is None or side < 1 for side in sides):
            gave = f"to_block_mask got block_size={block_size!r}."
            hint = "pass one whole number, or (queries, keys); FlexAttention's own is 128."
            raise BadValue(gave, "a block has at least 1 query and 1 key.", hint)
        grid = make_grid(self, Tq, Tk, B, H)
        rule = self.to_flex(grid.Tq, grid.Tk, B=grid.B, H=grid.H)
        return block_mask(self.key_ranges(grid, device), rule, (int(pair[0]), int(pair[1])))

    def tile(
        self,
        q: range,
        k: range,
        *,
        Tq: int | None = None,
        Tk: int | None = None,
        B: int | None = None,
        H: int | None = None,
    ) -> str:
        """Return "empty", "partial" or "full": what the mask allows of a block of cells.

        `q` and `k` are the positions of its queries and keys. Raises `BadType` unless they are
        ranges without a step, `BadValue` for a range that begins at no position.
        """
        for name, positions in (("q", q), ("k", k)):
            if not isinstance(positions, range) or positions.step != 1:
                rule = "a tile is a range of queries and a range of keys, without a step."
                hint = "pass for example range(0, 64)."
                raise BadType(f"tile got {name}={positions!r}.", rule, hint)
        grid = make_grid(self, Tq, Tk, B, H, default=max(q.stop, k.stop), at_least=(q.stop, 1, 1))
        for name, positions, size in (("queries", q, grid.Tq), ("keys", k, grid.Tk)):
            if positions and not 0 <= positions.start < size:
                gave = f"tile got the {name} {positions}, and there are {size}."
                rule = "a tile begins at an existing position, and may extend beyond the last one."
                hint = f"begin at a position from 0 to {size - 1}, or pass larger sizes."
                raise BadValue(gave, rule, hint)
        queries, keys = slice(q.start, q.stop), slice(k.start, k.stop)
        allowed = self.key_ranges(grid, CPU).to_bool(queries, keys)
        return "full" if allowed.all() else "partial" if allowed.any() else "empty"

    def picture(self, Tq: int | None = None, Tk: int | None = None) -> str:
        """Draw the mask with a row for each query and a column for each key.

        ■ means may look, · may not, and ▒ that some may: of the block, the batch or the heads.
        """
        grid = make_grid(self, Tq, Tk, default=8)
        ranges = self.key_ranges(grid, CPU)
        width = max(1, -(-max(grid.Tq, grid.Tk) // 32))
        rows = []
        for start in range(0, grid.Tq, width):
            some, full = ranges.tiles(slice(start, start + width), width)
            marks = ("■" if f else "▒" if s else "·" for s, f in zip(some, full, strict=True))
            rows.append(" ".join(marks))
        return "\n".join(rows)


def block_mask(
    ranges: KeyRanges,
    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    block_size: tuple[int, int],
) -> "BlockMask":
    """Return a `BlockMask` of `ranges`, with `rule(b, h, q, k)` for its partial blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    some, full = blocks(ranges, *block_size)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=block_size,
        mask_mod=rule,
        seq_lengths=(ranges.Tq, ranges.Tk),
    )


def blocks(ranges: KeyRanges, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return (any pair allowed, all pairs allowed) for each block of `height` x `width` cells.

    Both are (B|1, H|1, ceil(Tq / height), ceil(Tk / width)). A block that extends beyond Tq or Tk
    is not full.
    """
    strips, columns = -(-ranges.Tq // height), -(-ranges.Tk // width)
    if ranges.bits is not None:
        counts = [_count(ranges, slice(i * height, (i + 1) * height), width) for i in range(strips)]
        pairs = torch.stack(counts, 2)
        return pairs > 0, pairs == height * width
    missing = (0, 0, 0, strips * height - ranges.Tq)
    lo, hi = (x.expand(*x.shape[:2], ranges.Tq, -1) for x in (ranges.lo, ranges.hi))
    lo, hi = (
        F.pad(x, missing, value=ranges.Tk).unflatten(2, (strips, height)).flatten(3)
        for x in (lo, hi)
    )
    # Two ranges of a query never fill a block together, because they do not touch.
    touching = coverage(lo // width, torch.where(lo < hi, -(-hi // width), 0), columns)
    filling = coverage(-(-lo // width), hi // width, columns)
    return touching > 0, filling == height


def _count(ranges: KeyRanges, queries: slice, width: int) -> Tensor:
    """Count the allowed pairs in each block of these queries, (B|1, H|1, columns)."""
    keys = ranges.to_bool(queries).sum(2)
    return F.pad(keys, (0, -ranges.Tk % width)).unflatten(-1, (-1, width)).sum(-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Count the chosen blocks of each row, and list the indices of its blocks, the chosen first."""
    indices = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.int().contiguous()
