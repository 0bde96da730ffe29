"""What one rank computes by itself: its queries on the keys that are there, and the gradients.

The answer is a state of the mergeable softmax, in float32 or wider, so that nothing is rounded
before all keys were seen. The C++ core answers where it can, else torch, tile by tile. Gradients
are given the log-sum-exp and the output over all keys, so those of a part come out exactly.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines import CORE
from ..engines.cpu.backward import OutputGrads, gradients as core_gradients
from ..engines.cpu.pack import args_of, attend as core_attend
from ..masks import Grid
from ..problem import dropout, online_softmax
from ..problem.biases import Alibi, Bias, TensorBias
from ..problem.nan_safe import weighted_sum
from ..problem.online_softmax import State, WeightedSum, anchor
from ..problem.problem import Inputs, Problem, repeat_heads
from ..problem.tiles import key_tiles, query_tiles
from ..torch_state import no_autocast

TILE_QUERIES, TILE_KEYS = 256, 512


class Dropped(NamedTuple):
    """Dropout by seed, for weights that stand elsewhere in a larger problem."""

    p: float
    seed: int
    queries: Tensor
    keys: Tensor
    heads: int = 0  # the first head

    def factors(self, problem: Problem, queries: slice, keys: slice) -> Tensor:
        """1 / (1 - p) where the weight survives, else 0."""
        device = problem.device
        b = torch.arange(problem.B, device=device)
        h = torch.arange(self.heads, self.heads + problem.H, device=device)
        q, k = self.queries[queries], self.keys[keys]
        return dropout.factors(self.seed, self.p, b, h, q, k, problem.wide)


@dataclass(frozen=True, eq=False)
class PlacedAlibi(Bias):
    """ALiBi of queries and keys at some positions, (q,) and (k,), of a larger problem."""

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


class Finished(NamedTuple):
    """Queries that have seen all their keys: (B, H, q), and (B, H, q, Dv) twice. `dout` is the
    gradient of the output."""

    lse: Tensor
    out: Tensor
    dout: Tensor


class Learned(NamedTuple):
    """Gradients of q, k and v, in float32 or wider, and of a bias or of ALiBi's slopes."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def attend(p: Problem, inputs: Inputs, dropped: Dropped | None = None) -> State:
    """The state of these queries after these keys. Sinks come last, in `Ring.finish`."""
    p = replace(p, sinks=None, dropout=0.0, seed=None)
    with no_autocast(p.device):
        if dropped is None and not CORE.why_not(p):
            out, lse, rounding = core_attend(*inputs, args_of(p), True, p.dtype != torch.float32)
            assert lse is not None
            out = out.float() if rounding is None else out.float() + rounding.float()
            return state_of(out, lse)
        tiles = query_tiles(range(p.Tq), TILE_QUERIES)
        first, *others = [_state_of_tiles(p, inputs, dropped, queries) for queries in tiles]
        return first.map(lambda *parts: torch.cat(parts, 2), *others)


def no_keys(p: Problem, queries: int) -> State:
    """The state of so many queries before their first key."""
    none = torch.zeros(p.B, p.H, queries, dtype=p.wide, device=p.device)
    out = none.new_zeros(*none.shape, p.Dv)
    return State(none - torch.inf, none, {"out": WeightedSum(out)})


def state_of(out: Tensor, lse: Tensor) -> State:
    """A finished answer as a piece of a larger one: its keys count as one key that scores `lse`.
    `out` is changed in place."""
    top = lse.to(out.dtype)
    total = torch.exp(lse - anchor(top)).to(out.dtype).masked_fill(top == -torch.inf, 0.0)
    return State(top, total, {"out": WeightedSum(out.mul_(total.unsqueeze(-1)))})


def lse_of(state: State) -> Tensor:
    """The log-sum-exp in float64, as the C++ core reads it; -inf where no key was seen."""
    seen = state.sum.double().masked_fill(state.sum == 0, 1.0)
    return (state.max.double() + seen.log()).masked_fill(state.sum == 0, -torch.inf)


def gradients(
    p: Problem,
    inputs: Inputs,
    finished: Finished,
    learn_bias: bool,
    dropped: Dropped | None = None,
) -> Learned:
    """Gradients of these queries on these keys; `finished` is of the queries on all keys."""
    p = replace(p, sinks=None, dropout=0.0, seed=None)
    slopes = learn_bias and isinstance(p.bias, Alibi | PlacedAlibi)
    with no_autocast(p.device):
        if dropped is None and not slopes and not CORE.why_not(p):
            # In float32, because what ranks send each other is rounded once, after it is added up.
            q, k, v = (x.float() for x in inputs)
            of_output = OutputGrads(dout=finished.dout, out=finished.out)
            dq, dk, dv, dbias, _ = core_gradients(
                q, k, v, args_of(p), finished.lse, of_output, learn_bias
            )
            return Learned(dq, dk, dv, dbias if learn_bias else None)
        return _gradients_of_tiles(p, inputs, finished, learn_bias, dropped)


# --------------------------------------------------------------------------------- tiles, by torch


def _state_of_tiles(p: Problem, inputs: Inputs, dropped: Dropped | None, queries: slice) -> State:
    q = inputs.q[:, :, queries].to(p.wide)
    state = no_keys(p, queries.stop - queries.start)
    for keys, tile_problem in key_tiles(p, queries, TILE_KEYS):
        scores, keep = tile_problem.logits(q, inputs.k[:, :, keys], queries, keys)
        v = repeat_heads(inputs.v[:, :, keys].to(p.wide), p.H)
        drop = None if dropped is None else dropped.factors(p, queries, keys)
        state = online_softmax.merge(state, online_softmax.begin(scores, v, keep, drop))
    return state


def _gradients_of_tiles(
    p: Problem, inputs: Inputs, finished: Finished, learn_bias: bool, dropped: Dropped | None
) -> Learned:
    """With w the weights, r the factors of dropout and d the gradient of the output o, the gradient
    of a logit is w (r (d · v) - d · o); torch takes it from there through cap and scale."""
    dq, dk, dv = (torch.zeros_like(x, dtype=p.wide) for x in inputs)
    dbias, slopes = None, None
    if learn_bias and isinstance(p.bias, TensorBias):
        dbias = torch.zeros_like(p.bias.as_4d(), dtype=p.wide)
    elif learn_bias and isinstance(p.bias, Alibi | PlacedAlibi):
        alibi = p.bias if isinstance(p.bias, Alibi) else p.bias.alibi
        slopes = alibi.of(p.grid).to(p.wide).detach().requires_grad_()
        alibi = Alibi(slopes, alibi.align)
        placed = p.bias if isinstance(p.bias, PlacedAlibi) else None
        p = replace(p, bias=alibi if placed is None else replace(placed, alibi=alibi))
        dbias = torch.zeros_like(slopes)
    group = p.H // max(p.G, 1)
    for queries in query_tiles(range(p.Tq), TILE_QUERIES):
        lse, out, dout = (x[:, :, queries] for x in finished)
        top = lse.to(p.wide)
        share = torch.exp(anchor(top) - anchor(lse)).to(p.wide).unsqueeze(-1)  # of what scores top
        delta = (dout * out).sum(-1, keepdim=True)
        for keys, tile_problem in key_tiles(p, queries, TILE_KEYS):
            q = inputs.q[:, :, queries].to(p.wide).detach().requires_grad_()
            k = repeat_heads(inputs.k[:, :, keys].to(p.wide), p.H).detach().requires_grad_()
            v = repeat_heads(inputs.v[:, :, keys].to(p.wide), p.H)
            with torch.enable_grad():
                scores, keep = tile_problem.logits(q, k, queries, keys)
            weights = online_softmax.exps(scores.detach(), top) * share
            given, towards = weights, dout @ v.mT
            if dropped is not None:
                factors = dropped.factors(p, queries, keys)
                given, towards = weights * factors, towards * factors
            dlogits = weights * (towards - delta)
            if keep is not None:
                dlogits = dlogits.masked_fill(~keep, 0.0)
            learning = [q, k] if slopes is None else [q, k, slopes]
            found = torch.autograd.grad(scores, learning, dlogits)
            dq[:, :, queries] += found[0]
            dk[:, :, keys] += found[1].unflatten(1, (-1, max(group, 1))).sum(2)
            every = None if keep is None else keep.mT
            of_values = weighted_sum(given.mT, dout, every)
            dv[:, :, keys] += of_values.unflatten(1, (-1, max(group, 1))).sum(2)
            if slopes is not None and dbias is not None:
                dbias += found[2]
            elif dbias is not None:
                at = dbias if dbias.shape[2] == 1 else dbias[:, :, queries]
                at = at if at.shape[3] == 1 else at[..., keys]
                at += dlogits.sum_to_size(at.shape)
    return Learned(dq, dk, dv, dbias)
