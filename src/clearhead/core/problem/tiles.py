"""Split the attention matrix into tiles, so that it is never formed.

For each tile of queries, callers compute one tile of keys after the other. Tiles that are empty
under the mask are skipped, and full tiles need no mask.
Source: Dao, Fu, Ermon, Rudra & Ré 2022, "FlashAttention"; Rabe & Staats 2021.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

from ..torch_state import in_transform
from .problem import Problem

Result = TypeVar("Result")


def query_tiles(queries: range, height: int) -> list[slice]:
    """Split the queries into tiles of `height`, or one empty tile if there are none."""
    starts = range(queries.start, max(queries.stop, queries.start + 1), height)
    return [slice(start, min(start + height, queries.stop)) for start in starts]


def width_of_tiles(p: Problem, height: int, cells: int) -> int:
    """Return the keys of a tile of `height` queries with about `cells` over batches and heads."""
    return max(height, cells // max(1, p.B * p.H * height))


def for_queries(p: Problem, queries: slice, compute: Callable[[slice], Result]) -> Result:
    """Call `compute(queries)`, and recompute it in the backward pass if autograd records.

    So no tile is saved, and memory in training stays O(queries x tile of keys).
    """
    if not p.records_grad or in_transform():  # a checkpoint does not work under torch.func
        return compute(queries)
    draws = p.dropout > 0 and p.seed is None
    return checkpoint(compute, queries, use_reentrant=False, preserve_rng_state=draws)


def runs_of(positions: Iterable[int]) -> list[range]:
    """Split positions into runs of consecutive ones, in their order."""
    runs: list[range] = []
    for i in positions:
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def key_tiles(
    p: Problem, queries: slice, width: int, keys: range | None = None
) -> list[tuple[slice, Problem]]:
    """Return the tiles of `width` keys, among `keys`, that at least one of the queries may look at.

    Each comes with the problem of the tile, which has no mask if the mask allows every pair.
    """
    keys = range(p.Tk) if keys is None else keys
    some, full = p.key_ranges.tile_lists(queries, width)
    tiles = []
    for tile, any_pair in enumerate(some):
        part = slice(max(tile * width, keys.start), min((tile + 1) * width, keys.stop))
        if any_pair and part.start < part.stop:
            tiles.append((part, p.without_mask if full[tile] else p))
    return tiles
