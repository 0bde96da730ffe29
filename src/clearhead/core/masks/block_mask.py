"""Convert key ranges to a `BlockMask` of torch's FlexAttention.

torch's own `create_block_mask` evaluates the rule for every pair, in memory of Tq x Tk. The ends of
key ranges suffice to find the blocks that they touch and fill, in O(Tq x ranges + blocks).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .key_ranges import KeyRanges, coverage

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


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
