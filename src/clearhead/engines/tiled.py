"""The same answer from tiles, in plain torch: never a matrix of the size queries x keys.

For each tile of queries, the keys pass by tile by tile. Each tile gives a piece of softmax, and the
pieces merge (`online.py`). Tiles the mask leaves empty are skipped. In training the scores of a
tile of queries are recomputed in the backward pass, so memory stays O(tile x Tk).
Source: Dao, Fu, Ermon, Rudra & Ré 2022, "FlashAttention"; Rabe & Staats 2021.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..problem import online_softmax
from ..problem.problem import Inputs, Problem, repeat_heads
from ..torch_state import in_transform, is_onnx_export
from .engine import Engine

TILE_QUERIES = 256
TILE_KEYS = 512


class Tiled(Engine):
    """Every question but ONNX's, on every device, in memory that does not grow with the square."""

    name = "tiled"
    caption = "tiles and a mergeable softmax, in plain torch"

    def why_not(self, problem: Problem) -> list[str]:
        return ["an ONNX model would have the tiles of one length"] if is_onnx_export() else []

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def run(self, problem: Problem, inputs: Inputs) -> Tensor:
        rows: list[Tensor] = []
        for start in range(0, problem.Tq, TILE_QUERIES):
            queries = slice(start, min(start + TILE_QUERIES, problem.Tq))
            if problem.grad and not in_transform():  # checkpoint does not work under torch.func
                rows.append(checkpoint(_answer_rows, problem, inputs, queries, use_reentrant=False))
            else:
                rows.append(_answer_rows(problem, inputs, queries))
        if not rows:
            rows = [_answer_rows(problem, inputs, slice(0, 0))]
        return torch.cat(rows, 2)


def _answer_rows(problem: Problem, inputs: Inputs, queries: slice) -> Tensor:
    """The output of some queries, over all their keys."""
    p = problem
    q = inputs.q[:, :, queries].to(p.wide)

    def piece(keys: slice, full: bool = False) -> online_softmax.State:
        k, v = (repeat_heads(x[:, :, keys].to(p.wide), p.H) for x in (inputs.k, inputs.v))
        scores, keep = (p.unmasked if full else p).logits(q, k, queries, keys)
        return online_softmax.begin(scores, v, keep, _drop(p, scores, queries, keys))

    rows = piece(slice(0, 0))  # no key seen yet; joins the output to its inputs, for autograd
    for tile, full in _tiles(p, queries):
        keys = slice(tile * TILE_KEYS, min((tile + 1) * TILE_KEYS, p.Tk))
        rows = online_softmax.merge(rows, piece(keys, full))
    if p.sinks is None:
        return online_softmax.finish(rows)[0].to(p.dtype)
    blind = (rows.max == online_softmax.NOTHING).unsqueeze(-1)  # whatever the sink is
    rows = online_softmax.merge(
        rows, online_softmax.sink(p.sinks.to(p.wide).reshape(1, -1, 1), rows)
    )
    return online_softmax.finish(rows)[0].masked_fill(blind, 0.0).to(p.dtype)


def _tiles(p: Problem, queries: slice) -> list[tuple[int, bool]]:
    """The tiles of keys that these queries may look at, and whether the mask leaves them full."""
    some, full = p.key_ranges.tile_lists(queries, TILE_KEYS)
    return [(tile, full[tile]) for tile in range(len(some)) if some[tile]]


def _drop(p: Problem, scores: Tensor, queries: slice, keys: slice) -> Tensor | None:
    if not p.dropout:
        return None
    if p.seed is None:
        return F.dropout(torch.ones_like(scores), p.dropout)
    return p.survivors(queries, keys)
