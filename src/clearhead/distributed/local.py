"""Compute attention and gradients of one rank's queries over some of the keys.

The result is a mergeable softmax state in float32 or wider, so that nothing is rounded before all
keys are merged. The C++ core computes it if it can, otherwise torch, tile by tile. The gradients
use the log-sum-exp and the output over all keys, so they are exact for a part of the keys.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.engines.choice import CORE
from ..core.engines.cpu.backward import OutputGrads, gradients as core_gradients
from ..core.engines.cpu.call import args_of, attend as core_attend
from ..core.engines.tiled import TILE_KEYS, TILE_QUERIES, state_of_queries
from ..core.masks import Grid
from ..core.problem import dropout, online_softmax
from ..core.problem.biases import Alibi, Bias, TensorBias
from ..core.problem.nan_safe import weighted_sum
from ..core.problem.online_softmax import State, WeightedSum, anchor
from ..core.problem.problem import Inputs, Problem, repeat_heads
from ..core.problem.tiles import key_tiles, query_tiles
from ..core.torch_state import no_autocast


class BlockDropout(NamedTuple):
    """Dropout by seed for queries and keys at some positions of a larger problem."""

    p: float
    seed: int
    queries: Tensor
    keys: Tensor
    heads: int = 0  # the first head

    def factors(self, problem: Problem, queries: slice, keys: slice) -> Tensor:
        """Return 1 / (1 - p) for each weight that is kept, and 0 for each that is dropped."""
        device = problem.device
        b = torch.arange(problem.B, device=device)
        h = torch.arange(self.heads, self.heads + problem.H, device=device)
        q, k = self.queries[queries], self.keys[keys]
        return dropout.factors(self.seed, self.p, b, h, q, k, problem.wide)


@dataclass(frozen=True, eq=False)
class BlockAlibi(Bias):
    """ALiBi for queries and keys at some positions, (q,) and (k,), of a larger problem."""

    alibi: Alibi
    grid: Grid
    queries: Tensor
    keys: Tensor

    def __repr__(self) -> str:
        return f"{self.alibi!r} at positions"

    @property
    def numbers(self) -> Tensor | None:
        return self.alibi.numbers

    def check(self, grid: Grid) -> None:
        assert (grid.Tq, grid.Tk) == (len(self.queries), len(self.keys))

    def block(self, grid: Grid, queries: slice | Tensor, keys: slice, like: Tensor) -> Tensor:
        return self.alibi.block(self.grid, self.queries[queries], self.keys[keys], like)


class QueryOutputs(NamedTuple):
    """Results of queries over all their keys: the log-sum-exp (B, H, q), the output (B, H, q, Dv)
    and its gradient `dout`."""

    lse: Tensor
    out: Tensor
    dout: Tensor


class Gradients(NamedTuple):
    """Gradients of q, k and v, in float32 or wider, of a bias or ALiBi's slopes, and of sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None = None


def attend(p: Problem, inputs: Inputs, dropped: BlockDropout | None = None) -> State:
    """Compute the state of the queries over the keys. Sinks are added at the end
    (`Ring.finish`)."""

    def factors(scores: Tensor, queries: slice, keys: slice) -> Tensor | None:
        return None if dropped is None else dropped.factors(p, queries, keys)

    with no_autocast(p.device):
        if dropped is None and not CORE.why_not(p):
            out, lse, rounding = core_attend(*inputs, args_of(p), True, p.dtype != torch.float32)
            assert lse is not None
            out = out.float() if rounding is None else out.float() + rounding.float()
            return state_of(out, lse)
        tiles = query_tiles(range(p.Tq), TILE_QUERIES)
        first, *others = [state_of_queries(p, inputs, queries, factors) for queries in tiles]
        return first.map(lambda *parts: torch.cat(parts, 2), *others)


def no_keys(p: Problem, queries: int) -> State:
    """Return the state of queries that have seen no key."""
    none = torch.zeros(p.B, p.H, queries, dtype=p.wide, device=p.device)
    out = none.new_zeros(*none.shape, p.Dv)
    return State(none - torch.inf, none, {"out": WeightedSum(out)})


def state_of(out: Tensor, lse: Tensor) -> State:
    """Convert an output over some keys to a state, as of one key with the logit `lse`. `out` is
    changed in place."""
    top = lse.to(out.dtype)
    total = torch.exp(lse - anchor(top)).to(out.dtype).masked_fill(top == -torch.inf, 0.0)
    return State(top, total, {"out": WeightedSum(out.mul_(total.unsqueeze(-1)))})


def lse_of(state: State) -> Tensor:
    """Return the log-sum-exp in float64, as the C++ core reads it; -inf for a fully masked
    query."""
    seen = state.sum.double().masked_fill(state.sum == 0, 1.0)
    return (state.max.double() + seen.log()).masked_fill(state.sum == 0, -torch.inf)


def gradients(
    p: Problem, inputs: Inputs, outputs: QueryOutputs, bias_grad: bool,
    dropped: BlockDropout | None = None,
) -> Gradients:  # fmt: skip
    """Compute the gradients from the queries over these keys; `outputs` are over all keys."""
    slopes = bias_grad and isinstance(p.bias, Alibi | BlockAlibi)
    with no_autocast(p.device):
        if dropped is None and not slopes and not CORE.why_not(p):
            # In float32, since gradients are rounded once, after the sum over ranks.
            q, k, v = (x.float() for x in inputs)
            of_output = OutputGrads(dout=outputs.dout, out=outputs.out)
            dq, dk, dv, dbias, _ = core_gradients(
                q, k, v, args_of(p), outputs.lse, of_output, bias_grad
            )
            return Gradients(dq, dk, dv, dbias if bias_grad else None)
        return _gradients_of_tiles(p, inputs, outputs, bias_grad, dropped)


# --------------------------------------------------------------------------------- tiles, by torch


def _gradients_of_tiles(
    p: Problem, inputs: Inputs, outputs: QueryOutputs, bias_grad: bool, dropped: BlockDropout | None
) -> Gradients:
    """Compute the gradients tile by tile.

    w are the weights, r the factors of dropout, and d is the gradient of the output o. The gradient
    of a logit is w (r (d · v) - d · o); torch propagates it through soft cap and scale.
    """
    dq, dk, dv = (torch.zeros_like(x, dtype=p.wide) for x in inputs)
    dbias, slopes = None, None
    if bias_grad and isinstance(p.bias, TensorBias):
        dbias = torch.zeros_like(p.bias.as_4d(), dtype=p.wide)
    elif bias_grad and isinstance(p.bias, Alibi | BlockAlibi):
        alibi = p.bias if isinstance(p.bias, Alibi) else p.bias.alibi
        slopes = alibi.of(p.grid).to(p.wide).detach().requires_grad_()
        alibi = Alibi(slopes, alibi.align)
        placed = p.bias if isinstance(p.bias, BlockAlibi) else None
        p = replace(p, bias=alibi if placed is None else replace(placed, alibi=alibi))
        dbias = torch.zeros_like(slopes)
    group = p.H // max(p.G, 1)
    for queries in query_tiles(range(p.Tq), TILE_QUERIES):
        lse, out, dout = (x[:, :, queries] for x in outputs)
        top = lse.to(p.wide)
        # `top` is `lse` rounded; this factor corrects the weights.
        share = torch.exp(anchor(top) - anchor(lse)).to(p.wide).unsqueeze(-1)
        delta = (dout * out).sum(-1, keepdim=True)
        for keys, tile_problem in key_tiles(p, queries, TILE_KEYS):
            q = inputs.q[:, :, queries].to(p.wide).detach().requires_grad_()
            k = repeat_heads(inputs.k[:, :, keys].to(p.wide), p.H).detach().requires_grad_()
            v = repeat_heads(inputs.v[:, :, keys].to(p.wide), p.H)
            with torch.enable_grad():
                scores, keep = tile_problem.logits(q, k, queries, keys)
            weights = online_softmax.exps(scores.detach(), top) * share
            dropped_weights, dweights = weights, dout @ v.mT
            if dropped is not None:
                factors = dropped.factors(p, queries, keys)
                dropped_weights, dweights = weights * factors, dweights * factors
            dlogits = weights * (dweights - delta)
            if keep is not None:
                dlogits = dlogits.masked_fill(~keep, 0.0)
            differentiated = [q, k] if slopes is None else [q, k, slopes]
            grads = torch.autograd.grad(scores, differentiated, dlogits)
            dq[:, :, queries] += grads[0]
            dk[:, :, keys] += grads[1].unflatten(1, (-1, max(group, 1))).sum(2)
            keep_by_key = None if keep is None else keep.mT
            of_values = weighted_sum(dropped_weights.mT, dout, keep_by_key)
            dv[:, :, keys] += of_values.unflatten(1, (-1, max(group, 1))).sum(2)
            if slopes is not None and dbias is not None:
                dbias += grads[2]
            elif dbias is not None:
                at = dbias if dbias.shape[2] == 1 else dbias[:, :, queries]
                at = at if at.shape[3] == 1 else at[..., keys]
                at += dlogits.sum_to_size(at.shape)
    return Gradients(dq, dk, dv, dbias)
