"""Score keys by sums over queries that neither the kernels nor `sweep` compute.

Each is a pass of its own: in float64, tile by tile, in O(Tq + Tk) memory, without gradients.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import BadValue
from ..problem.online_softmax import MASKED, begin, finish, merge
from ..problem.problem import Inputs, Problem, repeat_heads
from ..problem.tiles import key_tiles, query_tiles, width_of_tiles
from ..torch_state import is_batched, no_autocast
from .statistic import zeros
from .weight_statistics import drop_error, received

TILE_QUERIES, TILE_CELLS = 64, 2**17  # of a tile, over all batches and heads
Tile = tuple[slice, Tensor, Tensor]  # keys, their logits (B, H, q, k), -inf where masked, numbers


@torch.no_grad()
def key_scores(problem: Problem, inputs: Inputs, of: received) -> Tensor:
    """Compute a statistic of keys that needs a pass of its own, (B, H, Tk).

    Raises `BadValue` inside torch.func.vmap.
    """
    if is_batched(*inputs):
        rule = "vmap cannot batch this statistic, which accumulates in place."
        hint = "pass the examples as the batch of q, k and v instead: (B, H, T, D)."
        raise BadValue(f"{of!r} was requested inside torch.func.vmap.", rule, hint)
    p = replace(problem, dtype=torch.float64)
    numbers_of = _changes if isinstance(of, drop_error) else _weights
    total, seen = zeros(p, p.Tk), zeros(p, p.Tk)
    counts = _counting_queries(p, of.last)
    tiles = query_tiles(range(p.Tq), TILE_QUERIES)
    with no_autocast(p.device):
        for queries in (x for x in tiles if counts[..., x].any()):
            for keys, scores, numbers in numbers_of(p, inputs, queries):
                skipped = (scores == MASKED) | ~counts[..., queries].unsqueeze(-1)
                numbers = numbers.pow(of.power).masked_fill(skipped, 0.0)
                sums = total[..., keys]
                if of.reduce == "max":
                    sums.copy_(torch.maximum(sums, numbers.amax(2)))
                else:
                    sums += numbers.sum(2)
                seen[..., keys] += (~skipped).sum(2)
    if of.reduce == "mean":
        total /= seen.clamp(min=1)
    return of.finish(total.to(problem.wide), p.grid, None)


def _counting_queries(p: Problem, last: int | None) -> Tensor:
    """Return which queries count, (B|1, H|1, Tq): the last ones that may look at any key."""
    visible = ~p.fully_masked()
    if last is None:
        return visible
    return visible & (visible.flip(-1).cumsum(-1).flip(-1) <= last)


def _tiles(p: Problem, inputs: Inputs, queries: slice) -> Iterator[tuple[slice, Tensor]]:
    q = inputs.q[:, :, queries]
    for keys, tile in key_tiles(p, queries, width_of_tiles(p, TILE_QUERIES, TILE_CELLS)):
        yield keys, tile.logits(q, inputs.k[:, :, keys], queries, keys)[0]


def _of_sinks(p: Problem, queries: slice) -> Tensor:
    """Return the log-sum-exp, (B, H, q), of the sinks alone."""
    sinks = torch.full((p.H,), MASKED, device=p.device) if p.sinks is None else p.sinks
    return sinks.double().view(1, -1, 1).expand(p.B, p.H, queries.stop - queries.start)


def _weights(p: Problem, inputs: Inputs, queries: slice) -> Iterator[Tile]:
    """Yield tiles with the weights; they are undefined where masked."""
    lse = _of_sinks(p, queries)
    for _, scores in _tiles(p, inputs, queries):
        lse = torch.logaddexp(lse, scores.logsumexp(-1))
    for keys, scores in _tiles(p, inputs, queries):
        yield keys, scores, (scores - lse.unsqueeze(-1)).exp()


def _changes(p: Problem, inputs: Inputs, queries: slice) -> Iterator[Tile]:
    """Yield tiles with `|z' - z|` for each key; it is undefined where masked.

    With the weight w it is w / (1 - w) |v - z|. Where w is near 1, both factors cancel. At most the
    largest weight of a query is above 1/2, so there z' is computed: attention without this key, and
    |z' - z| = w |v - z'|.
    """

    def values(keys: slice) -> Tensor:
        return repeat_heads(inputs.v[:, :, keys].double(), p.H)

    sinks = _of_sinks(p, queries)
    top = torch.full_like(sinks, MASKED)
    top_key = torch.zeros_like(sinks, dtype=torch.long)
    for keys, scores in _tiles(p, inputs, queries):
        largest, index = scores.max(-1)
        top_key = torch.where(largest > top, index + keys.start, top_key)
        top = torch.maximum(top, largest)
    positions = torch.arange(p.Tk, device=p.device)
    state = begin(sinks.new_zeros(*sinks.shape, 0), values(slice(0, 0)), None)
    for keys, scores in _tiles(p, inputs, queries):
        others = scores.masked_fill(top_key.unsqueeze(-1) == positions[keys], MASKED)
        state = merge(state, begin(others, values(keys), others != MASKED))
    without_top = finish(state, p.sinks)
    lse = torch.logaddexp(sinks, state.max + state.sum.log())
    rows = top_key.reshape(p.B, p.G, -1, 1).expand(-1, -1, -1, p.Dv)
    top_value = inputs.v.gather(2, rows).view_as(without_top).double()
    lse_all = torch.logaddexp(lse, top)
    w, rest = ((x - lse_all).exp().unsqueeze(-1) for x in (top, lse))
    out = w * top_value + rest * without_top
    of_top = w * (top_value - without_top).norm(dim=-1, keepdim=True)
    for keys, scores in _tiles(p, inputs, queries):
        v = values(keys)
        squares = v.square().sum(-1).unsqueeze(2) + out.square().sum(-1, keepdim=True)
        apart = (squares - 2 * out @ v.mT).clamp(min=0).sqrt()
        w = (scores - lse_all.unsqueeze(-1)).exp()
        is_top = top_key.unsqueeze(-1) == positions[keys]
        yield keys, scores, torch.where(is_top, of_top, w / (1 - w) * apart)
