"""Compute attention tile by tile in plain torch, without a matrix of queries x keys.

Each tile of keys yields a state of the softmax, and the states are merged
(`problem/tiles.py`, `problem/online_softmax.py`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import online_softmax
from ..problem.problem import Inputs, Problem, repeat_heads
from ..problem.tiles import for_queries, key_tiles, query_tiles
from ..torch_state import batches_gradients, is_onnx_export
from .engine import NO_BATCHING_RULE, Engine

TILE_QUERIES = 256
TILE_KEYS = 512


class Tiled(Engine):
    """An engine for every device and every problem except ONNX export. Its memory does not grow
    with queries x keys."""

    name = "tiled"
    caption = "tiles and a mergeable softmax, in plain torch"

    def why_not(self, problem: Problem) -> list[str]:
        reasons = [NO_BATCHING_RULE] if batches_gradients() else []
        if is_onnx_export():
            reasons.append("its tiles would be fixed to one length in an ONNX model")
        return reasons

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        def output(queries: slice) -> Tensor:
            return _output(problem, inputs, queries)

        tiles = query_tiles(range(problem.Tq), TILE_QUERIES)
        return torch.cat([for_queries(problem, queries, output) for queries in tiles], 2)


def _output(p: Problem, inputs: Inputs, queries: slice) -> Tensor:
    """Compute the output of some queries, over all their keys."""

    def factors(scores: Tensor, queries: slice, keys: slice) -> Tensor | None:
        if not p.dropout:
            return None
        if p.seed is None:
            return F.dropout(torch.ones_like(scores), p.dropout)
        return p.survivors(queries, keys)

    state = state_of_queries(p, inputs, queries, factors)
    return online_softmax.finish(state, p.sinks).to(p.dtype)


def state_of_queries(
    p: Problem, inputs: Inputs, queries: slice,
    factors: Callable[[Tensor, slice, slice], Tensor | None],
) -> online_softmax.State:  # fmt: skip
    """Compute the state of some queries after all their keys. `factors(scores, queries, keys)`
    returns the dropout factors of the weights of a tile, or None without dropout."""
    q = inputs.q[:, :, queries].to(p.wide)

    def state_after(keys: slice, tile_problem: Problem) -> online_softmax.State:
        scores, keep = tile_problem.logits(q, inputs.k[:, :, keys], queries, keys)
        v = repeat_heads(inputs.v[:, :, keys].to(p.wide), p.H)
        return online_softmax.begin(scores, v, keep, factors(scores, queries, keys))

    state = state_after(slice(0, 0), p)  # no keys; connects output and inputs for autograd
    for keys, tile_problem in key_tiles(p, queries, TILE_KEYS):
        state = online_softmax.merge(state, state_after(keys, tile_problem))
    return state
