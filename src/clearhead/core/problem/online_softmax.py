"""Compute softmax in pieces that merge: the state of some queries after some of their keys.

Each piece holds, for every query, the largest score `max`, the sum of exponentials relative to it
`sum`, and the weighted sum of values relative to it `out`. Two pieces merge relative to the larger
maximum:

    max = maximum(a.max, b.max)
    sum = a.sum * exp(a.max - max) + b.sum * exp(b.max - max)
    out = a.out * exp(a.max - max) + b.out * exp(b.max - max)

In the end `out / sum` is softmax(scores) @ V, and `max + log(sum)` is the log-sum-exp. Merging is
associative and commutative, and an empty piece (max = -inf) changes nothing. The tiles of a long
row, the keys of several ranks and the statistics of the weights (`stats/`) all use it.
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
LOWEST = -1000.0  # its exp is 0 even in float64, and unlike -inf it can be multiplied by 0


class Accumulator(Protocol):
    """A tuple of tensors (..., q, ...), summed or selected over keys."""

    def __iter__(self) -> Any: ...

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> Any:
        """Return the accumulator relative to another maximum.

        `shift` is the old maximum minus the new one, `factor` is exp(shift), and `sum` is relative
        to the old maximum. All are (..., q).
        """

    def merged(self, other: Any) -> Any:
        """Combine two accumulators that are relative to the same maximum."""


class WeightedSum(NamedTuple):
    """Σ exp(score - max) v over the keys, (..., q, n).

    v has n numbers for each key: its value vector, or its membership of n groups.
    """

    total: Tensor

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> "WeightedSum":
        return WeightedSum(self.total * factor.unsqueeze(-1))

    def merged(self, other: "WeightedSum") -> "WeightedSum":
        return WeightedSum(self.total + other.total)


class State(NamedTuple):
    """The state of some queries after some of their keys: `max` and `sum`, (..., q).

    `more` has other accumulators by name. Attention accumulates "out", the weighted sum of values.
    """

    max: Tensor
    sum: Tensor
    more: Mapping[str, Accumulator]

    def tensors(self) -> list[Tensor]:
        return [self.max, self.sum, *chain(*self.more.values())]

    def with_tensors(self, tensors: Iterable[Any]) -> "State":
        """Return a state with the same accumulators and other tensors."""
        x = iter(tensors)
        top, total = next(x), next(x)
        more = {name: type(a)(*(next(x) for _ in a)) for name, a in self.more.items()}
        return State(top, total, more)

    def map(self, change: Callable[..., Tensor], *others: "State") -> "State":
        """Apply `change` to every tensor, together with the same tensor of the other states."""
        columns = zip(*(state.tensors() for state in (self, *others)), strict=True)
        return self.with_tensors(change(*column) for column in columns)


def begin(scores: Tensor, v: Tensor, keep: Tensor | None, drop: Tensor | None = None) -> State:
    """Compute the state of one piece: masked scores (..., q, k), -inf outside `keep`, and values.

    `drop`, the factors of dropout, multiplies the weights of the values, but not the sum. The
    maximum is a constant for autograd, because the result does not depend on it.
    """
    top = largest(scores)
    weights = exps(scores, top)
    out = weighted_sum(weights if drop is None else weights * drop, v, keep)
    return State(top, weights.sum(-1), {"out": WeightedSum(out)})


def merge(a: State, b: State) -> State:
    """Combine the states of two sets of keys. Accumulators that only `a` has stay as they are."""
    top = torch.maximum(a.max, b.max)
    base = anchor(top.detach())
    a, b = moved(a, base), moved(b, base)
    more = {name: x.merged(b.more[name]) if name in b.more else x for name, x in a.more.items()}
    return State(top, a.sum + b.sum, more)


def moved(state: State, base: Tensor) -> State:
    """Return the sums relative to `base` instead of the maximum, both constants for autograd.

    A sum of NaN, whose maximum is NaN or infinite, stays NaN and passes on no gradient.
    """
    shift = (state.max.detach() - base).clamp(min=LOWEST)
    factor = shift.exp().masked_fill(torch.isnan(shift), 1.0)
    more = {name: x.moved(shift, factor, state.sum) for name, x in state.more.items()}
    return State(state.max, state.sum * factor, more)


def with_sinks(state: State, sinks: Tensor | None) -> State:
    """Add one more logit per head, (H,), that has no value, to a state (B, H, q)."""
    if sinks is None:
        return state
    logits = sinks.to(state.max).unsqueeze(-1).expand_as(state.max)
    top = logits.detach()
    return merge(state, State(top, torch.exp(logits - anchor(top)), {}))


def finish(state: State, sinks: Tensor | None = None) -> Tensor:
    """Compute softmax(scores) @ V. A query without keys gets 0, and a query with NaN scores NaN.

    Neither passes on a gradient, which as 0 * NaN would reach keys that are masked for it.
    """
    complete = with_sinks(state, sinks)
    is_nan = torch.isnan(complete.sum)
    total = complete.sum.masked_fill((complete.sum == 0) | is_nan, 1.0)
    (out,) = complete.more["out"]
    out = (out / total.unsqueeze(-1)).masked_fill(is_nan.unsqueeze(-1), float("nan"))
    if sinks is None:
        return out
    return out.masked_fill((state.max == MASKED).unsqueeze(-1), 0.0)  # even if the sink is NaN


def largest(scores: Tensor) -> Tensor:
    """Compute the maximum over the keys, a constant for autograd; -inf without keys."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], MASKED)
    return scores.detach().amax(-1)


def exps(scores: Tensor, top: Tensor) -> Tensor:
    """Compute exp(score - max), with 0 where the score is -inf, even in a row of NaN."""
    base = anchor(top)
    return zero_if_masked(torch.exp(scores - base.unsqueeze(-1)), scores, base)


def zero_if_masked(exps: Tensor, scores: Tensor, base: Tensor) -> Tensor:
    """Set exp(scores - base) to 0 where a score is -inf.

    With a finite `base` it is already 0; with NaN or infinity in `base` it is NaN.
    """
    return exps if finite(base) else exps.masked_fill(scores == MASKED, 0.0)


def anchor(top: Tensor) -> Tensor:
    """Return the base of the exponents: the maximum, or 0 where it is -inf."""
    return top.masked_fill(top == MASKED, 0.0)
