"""Softmax that can be merged: a running maximum, a running sum, a running weighted sum.

Softmax over a long row can be taken in pieces. Each piece keeps three numbers per query: the
largest score `max`, the sum of exponentials relative to it `sum`, and the weighted sum of values
relative to it `out`. Two pieces merge by moving both to the larger maximum:

    max = maximum(a.max, b.max)
    sum = a.sum * exp(a.max - max) + b.sum * exp(b.max - max)
    out = a.out * exp(a.max - max) + b.out * exp(b.max - max)

and in the end `out / sum` is softmax(scores) @ V, and `max + log(sum)` is the log-sum-exp.
Merging is associative and commutative, and an empty piece (max = -inf) changes nothing, so tiles
and split keys rest on it; statistics, which keep other sums, do the same (`stats.state`). Source:
Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Rabe & Staats 2021,
"Self-attention does not need O(n^2) memory".
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .nan_safe import finite, weighted_sum

NOTHING = float("-inf")


class State(NamedTuple):
    """The state of some queries after some of their keys: (..., q), (..., q), (..., q, v)."""

    max: Tensor
    sum: Tensor
    out: Tensor


def begin(scores: Tensor, v: Tensor, keep: Tensor | None, drop: Tensor | None = None) -> State:
    """One piece: masked scores (..., q, k), with -inf where `keep` is False, and its values.

    `drop` multiplies the weights that reach the values (dropout), never the sum. The maximum is a
    constant for autograd: the result does not depend on it.
    """
    top = largest(scores)
    exps = powers(scores, top)
    return State(top, exps.sum(-1), weighted_sum(exps if drop is None else exps * drop, v, keep))


def sink(logits: Tensor, rows: State) -> State:
    """A piece that takes weight and gives no value: one extra logit, broadcast over the queries."""
    logits = logits.expand_as(rows.max)
    top = logits.detach()
    return State(top, torch.exp(logits - anchor(top)), torch.zeros_like(rows.out))


def merge(a: State, b: State) -> State:
    top = torch.maximum(a.max, b.max)
    base = anchor(top)
    from_a, from_b = (_factor(part.max - base) for part in (a, b))
    return State(
        top,
        a.sum * from_a + b.sum * from_b,
        a.out * from_a.unsqueeze(-1) + b.out * from_b.unsqueeze(-1),
    )


def _factor(below: Tensor) -> Tensor:
    """What the sums of a piece are multiplied by. Where a maximum is NaN or infinite the sum is NaN
    already, and stays it."""
    return torch.exp(below).masked_fill(torch.isnan(below), 1.0)


def finish(rows: State) -> tuple[Tensor, Tensor]:
    """(softmax @ V, log-sum-exp). A query that saw nothing gives 0 and -inf, one that saw NaN NaN;
    neither sends a gradient back, which would reach what it did not see through 0 * NaN."""
    blind, lost = rows.sum == 0, torch.isnan(rows.sum)
    total = rows.sum.masked_fill(blind | lost, 1.0)
    out = (rows.out / total.unsqueeze(-1)).masked_fill(lost.unsqueeze(-1), float("nan"))
    return out, (rows.max + total.log()).masked_fill(blind, NOTHING)


def largest(scores: Tensor) -> Tensor:
    """The maximum over the keys, a constant for autograd; -inf where there are none."""
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:-1], NOTHING)
    return scores.detach().amax(-1)


def powers(scores: Tensor, top: Tensor) -> Tensor:
    """exp(score - max); 0 where the score is -inf, whatever else the row holds."""
    base = anchor(top)
    return unseen_are_zero(torch.exp(scores - base.unsqueeze(-1)), scores, base)


def unseen_are_zero(exps: Tensor, scores: Tensor, base: Tensor) -> Tensor:
    """The exponentials of `scores` relative to `base`, 0 where a score is -inf: they are that below
    a finite base already, and NaN below NaN or infinity."""
    return exps if finite(base) else exps.masked_fill(scores == NOTHING, 0.0)


def anchor(top: Tensor) -> Tensor:
    """What exponents are taken relative to: the maximum, or 0 where there is none yet."""
    return top.masked_fill(top == NOTHING, 0.0)
