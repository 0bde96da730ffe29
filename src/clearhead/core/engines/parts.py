"""The largest parts of each query: weights times products of the values with a direction.

The part of key j at query i is ``w[i, j] * (v[j] @ direction[i])``. With the output projection in
the directions, it is what a head writes toward a token from one source.

The C++ core computes it in one sweep. Otherwise, and if a visible part is NaN or infinite, torch
computes the weights again tile by tile, after a sweep for their log-sum-exp. Memory is O(Tq + Tk).

Letters: B batch, H query heads, Tq queries, Tk keys, Dv value size.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem.online_softmax import MASKED
from ..problem.problem import Inputs, Problem, repeat_heads
from ..problem.tiles import key_tiles, query_tiles
from .choice import CORE, statistics_of
from .cpu.call import all_plain, args_of, check
from .cpu.extension import core, must_have_fields
from .operators import with_own_buffers, with_rows

TILE_CELLS, TILE_KEYS = 2**20, 1024  # of a tile over all heads; its keys
BLOCK = 32  # keys whose largest part is compared first


class LargestParts(NamedTuple):
    """The largest parts of each query along its direction by absolute value, and their keys.

    `directions` is (B, H, Tq, Dv), and the others (B, H, Tq, n). NaN is above all numbers, as in
    torch.topk. If fewer parts differ from 0, the other entries are 0 and -1.
    """

    directions: Tensor
    parts: Tensor
    keys: Tensor


must_have_fields(LargestParts)


@torch.no_grad()
def largest_parts(problem: Problem, inputs: Inputs, directions: Tensor, n: int) -> LargestParts:
    """Find the n largest parts of each query, for `directions` of shape (B, H, Tq, Dv)."""
    p = problem.without_dropout
    if not CORE.why_not(p) and lists_parts(p, inputs, directions):
        largest = _by_core(p, inputs, directions, n)
        if not bool(largest.parts.isnan().any()):
            return largest
    return _by_torch(p, inputs, directions, n)


def lists_parts(p: Problem, inputs: Inputs, directions: Tensor) -> bool:
    """Return whether the core can list the parts of this problem, which it computes in float32."""
    return p.wide == torch.float32 and all_plain(p, inputs) and directions.dtype == torch.float32


@with_own_buffers
def _by_core(p: Problem, inputs: Inputs, directions: Tensor, n: int) -> LargestParts:
    q, k, v = (with_rows(x.to(torch.float32)) for x in inputs)
    parts = q.new_empty(p.B, p.H, p.Tq, n)
    largest = LargestParts(with_rows(directions), parts, torch.empty_like(parts, dtype=torch.long))
    check(core.largest_parts(q, k, v, args_of(p), largest))
    return largest


def _by_torch(p: Problem, inputs: Inputs, directions: Tensor, n: int) -> LargestParts:
    values = repeat_heads(inputs.v, p.H).to(directions.dtype)
    lse = cast(Tensor, statistics_of(p, inputs, ["lse"])["lse"]).unsqueeze(-1)
    lse = lse.masked_fill(lse == MASKED, 0.0)  # of a fully masked query
    width = min(TILE_KEYS, -(-p.Tk // BLOCK) * BLOCK)
    height = max(1, TILE_CELLS // (p.B * p.H * width))
    tiles = []
    for queries in query_tiles(range(p.Tq), height):
        q, along = inputs.q[:, :, queries].to(p.wide), directions[:, :, queries]
        size = (p.B, p.H, queries.stop - queries.start, n)
        best = along.new_zeros(size), torch.full(size, -1, device=p.device)
        for columns, tile in key_tiles(p, queries, width):
            scores = tile.logits(q, inputs.k[:, :, columns], queries, columns)[0]
            weights = (scores - lse[:, :, queries]).exp_().to(values.dtype)
            products = along @ values[:, :, columns].mT
            # A masked key adds 0, even if its value or the query is NaN.
            parts = products.mul_(weights).masked_fill_(scores == MASKED, 0)
            own = _largest_of_tile(parts, columns.start, n)
            both, at = (torch.cat(pair, -1) for pair in zip(best, own, strict=True))
            best = _largest_of(both, at, n)
        tiles.append(best)
    parts, keys = (torch.cat(of_tiles, 2) for of_tiles in zip(*tiles, strict=True))
    return LargestParts(directions, parts, keys.masked_fill(parts == 0, -1))


def _largest_of_tile(parts: Tensor, start: int, n: int) -> tuple[Tensor, Tensor]:
    """Find the n largest of (B, H, q, k) by absolute value; there may be fewer.

    They are in the n blocks of keys with the largest maxima, and torch.topk sorts only these.
    """
    width = parts.shape[-1]
    blocks = F.pad(parts, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).topk(min(n, blocks.shape[-2]), sorted=False).indices
    some = blocks.gather(-2, largest.unsqueeze(-1).expand(*largest.shape, BLOCK))
    at = torch.arange(BLOCK, device=parts.device) + start + largest.unsqueeze(-1) * BLOCK
    return _largest_of(some.flatten(-2), at.flatten(-2), n)


def _largest_of(parts: Tensor, keys: Tensor, n: int) -> tuple[Tensor, Tensor]:
    order = parts.abs().topk(min(n, parts.shape[-1]), dim=-1).indices
    return parts.gather(-1, order), keys.gather(-1, order)
