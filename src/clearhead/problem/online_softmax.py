"""Softmax that can be merged: the state of some queries after some of their keys.

Softmax over a long row can be taken in pieces. Each piece keeps, for every query, the largest score
`max`, the sum of exponentials relative to it `sum`, and the weighted sum of values relative to it
`out`. Two pieces merge by moving both to the larger maximum:

    max = maximum(a.max, b.max)
    sum = a.sum * exp(a.max - max) + b.sum * exp(b.max - max)
    out = a.out * exp(a.max - max) + b.out * exp(b.max - max)

In the end `out / sum` is softmax(scores) @ V, and `max + log(sum)` is the log-sum-exp. Merging is
associative and commutative, and an empty piece (max = -inf) changes nothing, so the tiles of a
long row, the keys of several ranks and the statistics of the weights (`stats/`) all rest on it.
Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Rabe & Staats 2021,
"Self-attention does not need O(n^2) memory".
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .nan_safe import finite, weighted_sum

MASKED = float("-inf")
LOWEST = -1000.0  # exp of it is 0 even in float64, and unlike -inf it may be multiplied by 0


class Accumulator(Protocol):
    """A tuple of tensors (..., q, ...), summed or selected over keys."""

    def __iter__(self) -> Any: ...

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> Any:
        """The same relative to another maximum: `shift` is the old one less the new one, `factor`
        is exp(shift), and `sum` is that of the old one. All are (..., q)."""

    def merged(self, other: Any) -> Any:
        """The same after the keys of both, which are relative to the same maximum."""


class WeightedSum(NamedTuple):
    """Σ exp(x - max) v over the keys, of some v for every key: (..., q, n)."""

    total: Tensor

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> "WeightedSum":
        return WeightedSum(self.total * factor.unsqueeze(-1))

    def merged(self, other: "WeightedSum") -> "WeightedSum":
        return WeightedSum(self.total + other.total)


class State(NamedTuple):
    """Some queries after some of their keys: `max` and `sum`, (..., q), and by name what else is
    accumulated. Attention accumulates "out", the weighted sum of the values."""

    max: Tensor
    sum: Tensor
    more: Mapping[str, Accumulator]

    def tensors(self) -> list[Tensor]:
        return [self.max, self.sum, *chain(*self.more.values())]

    def with_tensors(self, tensors: Iterable[Any]) -> "State":
        """The same accumulators, of other tensors."""
        x = iter(tensors)
        top, total = next(x), next(x)
        more = {name: type(a)(*(next(x) for _ in a)) for name, a in self.more.items()}
        return State(top, total, more)

    def map(self, change: Callable[..., Tensor], *others: "State") -> "State":
        """`change` of every tensor, and the same tensor of the other states."""
        columns = zip(*(state.tensors() for state in (self, *others)), strict=True)
        return self.with_tensors(change(*column) for column in columns)


def begin(scores: Tensor, v: Tensor, keep: Tensor | None, drop: Tensor | None = None) -> State:
    """One piece: masked scores (..., q, k), with -inf where `keep` is False, and its values.

    `drop` multiplies the weights that reach the values (dropout), never the sum. The maximum is a
    constant for autograd: the result does not depend on it.
    """
    top = largest(scores)
    weights = exps(scores, top)
    out = weighted_sum(weights if drop is None else weights * drop, v, keep)
    return State(top, weights.sum(-1), {"out": WeightedSum(out)})


def merge(a: State, b: State) -> State:
    """The state after the keys of both. What `b` does not accumulate stays that of `a`."""
    top = torch.maximum(a.max, b.max)
    base = anchor(top.detach())
    a, b = moved(a, base), moved(b, base)
    more = {name: x.merged(b.more[name]) if name in b.more else x for name, x in a.more.items()}
    return State(top, a.sum + b.sum, more)


def moved(state: State, base: Tensor) -> State:
    """The sums relative to `base` in place of the maximum, both constants for autograd. A sum that
    is NaN, below a maximum that is NaN or infinite, stays NaN and passes no gradient on."""
    shift = (state.max.detach() - base).clamp(min=LOWEST)
    factor = shift.exp().masked_fill(torch.isnan(shift), 1.0)
    more = {name: x.moved(shift, factor, state.sum) for name, x in state.more.items()}
    return State(state.max, state.sum * factor, more)


def with_sinks(state: State, sinks: Tensor | None) -> State:
    """After one more logit per head, (H,), that has no value; the state is (B, H, q)."""
    if sinks is None:
        return state
    logits = sinks.to(state.max).unsqueeze(-1).expand_as(state.max)
    top = logits.detach()
    return merge(state, State(top, torch.exp(logits - anchor(top)), {}))


def finish(state: State, sinks: Tensor | None = None) -> Tensor:
    """softmax(scores) @ V. A query without keys gives 0, and one whose scores hold NaN gives NaN.
    Neither passes a gradient on, which as 0 * NaN would reach keys that are masked for it."""
    complete = with_sinks(state, sinks)
    is_nan = torch.isnan(complete.sum)
    total = complete.sum.masked_fill((complete.sum == 0) | is_nan, 1.0)
    (out,) = complete.more["out"]
    out = (out / total.unsqueeze(-1)).masked_fill(is_nan.unsqueeze(-1), float("nan"))
    if sinks is None:
        return out
    return out.masked_fill((state.max == MASKED).unsqueeze(-1), 0.0)  # even if the sink is NaN


def largest(scores: Tensor) -> Tensor:
    """The maximum over the keys, a constant for autograd; -inf where there are none."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], MASKED)
    return scores.detach().amax(-1)


def exps(scores: Tensor, top: Tensor) -> Tensor:
    """exp(score - max); 0 where the score is -inf, even in a row of NaN."""
    base = anchor(top)
    return zero_if_masked(torch.exp(scores - base.unsqueeze(-1)), scores, base)


def zero_if_masked(exps: Tensor, scores: Tensor, base: Tensor) -> Tensor:
    """exp(scores - base) with 0 where a score is -inf. It is 0 already if `base` is finite; if
    `base` is NaN or infinite, it is NaN."""
    return exps if finite(base) else exps.masked_fill(scores == MASKED, 0.0)


def anchor(top: Tensor) -> Tensor:
    """What exponents are taken relative to: the maximum, or 0 where there is none yet."""
    return top.masked_fill(top == MASKED, 0.0)
