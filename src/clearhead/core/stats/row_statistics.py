"""Define the statistics of each query's weights, which need one sweep over the keys.

Those of what a head writes follow from the output of a call, and `watch` computes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadValue
from ..masks import Grid
from ..problem.online_softmax import MASKED, anchor
from ..problem.problem import Problem
from .per_key import Numbers
from .statistic import FinishedRows, RowStatistic, Statistic, Tile, TopWeights, checked_count, zeros
from .top_scores import TopScores, top_of_tile


@dataclass(frozen=True)
class LogSumExp(RowStatistic):
    """The natural log-sum-exp of the logits and the sink; -inf if there are none."""

    name, formula, by_layout = "lse", "log Σₖ exp(x)", True

    def finish(self, rows: FinishedRows) -> Tensor:
        return rows.lse


@dataclass(frozen=True)
class Largest(RowStatistic):
    """The largest logit over the keys, without the sink; -inf for a fully masked query."""

    name, formula, by_layout = "max", "maxₖ x", True

    def finish(self, rows: FinishedRows) -> Tensor:
        return rows.state.max


class Moment(NamedTuple):
    """Σ exp(x - max) (x - max), (B, H, q), for the entropy: H = lse - Σ w x."""

    total: Tensor

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> "Moment":
        return Moment(factor * (self.total + shift * sum))

    def merged(self, other: "Moment") -> "Moment":
        return Moment(self.total + other.total)


@dataclass(frozen=True)
class Entropy(RowStatistic):
    """The entropy of the weights in nats: 0 for one key, log n for n equal weights."""

    name, formula = "entropy", "-Σₖ w log w"
    accumulator, by_layout = "moment", True

    def empty(self, p: Problem, queries: int) -> Moment:
        return Moment(zeros(p, queries))

    def counter(self, p: Problem) -> Callable[[Tile], Moment]:
        return lambda tile: Moment(torch.einsum("bhqk,bhqk->bhq", tile.exps, tile.below))

    def finish(self, rows: FinishedRows) -> Tensor:
        # With p = exp(x - m) and w = p f:  -Σ w log w = f (-log f Σ p - Σ p (x - m)).
        factor, state = rows.factor, rows.state
        (moment,) = state.more["moment"]
        gap = -factor.masked_fill(factor == 0, 1.0).log()
        # By rounding the result may be -1e-8, and for one key it is -0.
        return self.of_entropy((factor * (gap * state.sum - moment)).clamp(min=0) + 0.0)

    def of_entropy(self, entropy: Tensor) -> Tensor:
        """Convert the entropy in nats to this statistic."""
        return entropy


@dataclass(frozen=True)
class Effective(Entropy):
    """The number of equal weights with the same entropy: exp(entropy)."""

    name, formula = "effective", "exp(entropy)"

    def of_entropy(self, entropy: Tensor) -> Tensor:
        return entropy.exp()


@dataclass(frozen=True, repr=False)
class topk(RowStatistic):
    """The `n` largest weights of each query, in falling order; ties go to the lower key.

    They are ordered by logit, so weights that round to 0 keep their order. If a query may look at
    fewer keys, the other entries have weight 0 and key -1. In `look` and `matrix`, n is at most Tk.
    In `watch`, a call of fewer keys has all of them: the result is (B, H, Tq, min(n, Tk)). There a
    key is its position in the text.

    `by` is a number of 0 or more for every key, (Tk,), (H, Tk) or (B, H, Tk), without a gradient.
    With it, the statistic finds the largest products of weight and number, and `weights` holds the
    products. In `watch`, "value" means the norms of the values after the output projection, and
    "relative_value" those of their differences from the value of the first token.

    Raises `BadType` if n is not a whole number, or `by` not a tensor. Raises `BadValue` if n is
    below 1 or above Tk, or if `by` has a negative number or another shape.
    """

    n: int
    by: Numbers = None

    name, formula, shape = "topk", "the n largest w over k", "B H Tq n"
    call, example = "topk(n)", "topk(8)"
    accumulator, by_layout = "top", True

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_count(self.n, "topk", "n"))
        self.read_by(positive=True)

    def must_fit(self, grid: Grid) -> None:
        if self.n > grid.Tk:
            gave = f"topk got n={self.n}, and there are {grid.Tk} keys."
            hint = f"pass an n up to {grid.Tk}." if grid.Tk else "request topk only with keys."
            raise BadValue(gave, "n is at most the number of keys.", hint)
        super().must_fit(grid)

    def least_keys(self, p: Problem) -> int:
        # torch.topk sorts only a part, 5 to 10 times faster, if a row is 64 times as long as n.
        return 128 * min(self.n, p.Tk)

    def empty(self, p: Problem, queries: int) -> TopScores:
        scores = zeros(p, queries, min(self.n, p.Tk)) + MASKED
        return TopScores(scores, torch.full_like(scores, -1, dtype=torch.long))

    def counter(self, p: Problem) -> Callable[[Tile], TopScores]:
        if self.factors is None:
            return lambda tile: top_of_tile(tile.scores, tile.keys.start, self.n)
        offsets = self.factors.of(p).log().unsqueeze(2)

        def count(tile: Tile) -> TopScores:
            raised = tile.scores + offsets[..., tile.keys]
            raised = raised.masked_fill(tile.scores == MASKED, MASKED)  # also for infinite numbers
            return top_of_tile(raised, tile.keys.start, self.n)

        return count

    def finish(self, rows: FinishedRows) -> TopWeights:
        scores, keys = rows.state.more["top"]
        largest = scores[..., :1] if self.by is None else anchor(rows.state.max).unsqueeze(-1)
        below = (scores - largest.detach()).masked_fill(keys < 0, MASKED)
        return TopWeights(rows.weight(below.exp().to(rows.factor.dtype)), keys)


@dataclass(frozen=True)
class Varying(Statistic):
    """What a head writes at a query, without the mean of what it writes in the text: squared, and
    divided by the mean square of what it writes.

    With o = z W_O it is |o - mean o|² / mean |o|². Its mean over queries is the fraction of the
    head's squared output that varies, from 0 to 1; the rest is one constant vector. Padding and
    fully masked queries are in no mean, and get 0.
    """

    name, sweep = "varying", "output"
    formula = "|o - mean o|² / mean |o|² over queries, o = z W_O"

    def must_fit(self, grid: Grid) -> None:
        rule = "what a head writes depends on the output projection of a layer."
        hint = 'use watch(model, stats=["varying"]).'
        raise BadValue('stats has "varying" outside a model.', rule, hint)

    def of_output(
        self, out: Tensor, root: Tensor, counts: Tensor, over_ranks: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Compute it, (B, H, Tq), from z (B, H, Tq, Dv) and W_O as a root (H, Dv, Dv).

        `counts`, (B|1, H|1, Tq), is False for queries that are in no mean. The queries may be a
        part of the text; `over_ranks` adds the sums of the other parts.
        """
        counts = counts.to(out.device)
        z = out.masked_fill(~counts.unsqueeze(-1), 0.0)
        n = over_ranks(counts.sum(-1, keepdim=True)).clamp(min=1)
        mean = over_ranks(z.sum(2, keepdim=True)) / n.unsqueeze(-1)
        change = ((z - mean) @ root).square().sum(-1)
        total = over_ranks((z @ root).square().sum((2, 3)).unsqueeze(-1)) / n
        share = change / torch.where(total == 0, 1.0, total)
        return share.masked_fill(~counts, 0.0)
