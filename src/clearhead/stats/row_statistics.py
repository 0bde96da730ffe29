"""The statistics of a query's weights, which the first sweep knows once all keys have passed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BadValue
from ..masks import Grid
from ..problem.online_softmax import MASKED, anchor
from ..problem.problem import Problem
from .per_key import Numbers
from .statistic import FinishedRows, RowStatistic, Tile, TopWeights, checked_count, zeros
from .top_scores import TopScores, top_of_tile


@dataclass(frozen=True)
class LogSumExp(RowStatistic):
    """The natural log-sum-exp of the logits, sink included; -inf if there is nothing to sum."""

    name, formula = "lse", "log Σₖ exp(x)"

    def finish(self, rows: FinishedRows) -> Tensor:
        return rows.lse


@dataclass(frozen=True)
class Largest(RowStatistic):
    """The largest logit over the keys (the sink is no key); -inf for a blind query."""

    name, formula = "max", "maxₖ x"

    def finish(self, rows: FinishedRows) -> Tensor:
        return rows.state.max


class Moment(NamedTuple):
    """Σ exp(x - max) (x - max), (B, H, q). With it the entropy is the identity H = lse - Σ w x."""

    total: Tensor

    def moved(self, shift: Tensor, factor: Tensor, sum: Tensor) -> "Moment":
        return Moment(factor * (self.total + shift * sum))

    def merged(self, other: "Moment") -> "Moment":
        return Moment(self.total + other.total)


@dataclass(frozen=True)
class Entropy(RowStatistic):
    """How spread the weights are, in nats: 0 on one key, log n on n keys alike, 0 if blind."""

    name, formula = "entropy", "-Σₖ w log w"
    accumulator = "moment"

    def empty(self, p: Problem, queries: int) -> Moment:
        return Moment(zeros(p, queries))

    def counter(self, p: Problem) -> Callable[[Tile], Moment]:
        return lambda tile: Moment(torch.einsum("bhqk,bhqk->bhq", tile.exps, tile.below))

    def finish(self, rows: FinishedRows) -> Tensor:
        # With p = exp(x - m) and w = p share:  -Σ w log w = share (-log share Σ p - Σ p (x - m)).
        share, state = rows.share, rows.state
        (moment,) = state.more["moment"]
        gap = -share.masked_fill(share == 0, 1.0).log()
        # Of rounding alone it may come out as -1e-8, and of one key as -0.
        return (share * (gap * state.sum - moment)).clamp(min=0) + 0.0


@dataclass(frozen=True)
class Effective(Entropy):
    """How many equal weights would be as spread: exp(entropy), so 1 where the entropy is 0."""

    name, formula = "effective", "exp(entropy)"

    def finish(self, rows: FinishedRows) -> Tensor:
        return super().finish(rows).exp()


@dataclass(frozen=True)
class topk(RowStatistic):
    """The `n` largest weights of each query, in falling order, ties to the lower key.

    They are ordered by logit, so weights too small to tell from 0 keep their order. Where fewer
    keys are allowed, the weight is 0 and the key -1; so it is in `watch` where a call has fewer
    keys, as the first steps of a generation have. In `look` and `matrix`, n is at most Tk. In
    `watch` a key is its position in the text.

    With `by`, a number of 0 or more for every key, (Tk,), (H, Tk) or (B, H, Tk), they are the
    largest products of weight and number, and `weights` holds the products. "value" in `watch`
    takes the norms of what each value writes. The numbers receive no gradient.
    """

    n: int
    by: Numbers = None

    name, formula, shape = "topk", "the n largest w over k", "B H Tq n"
    call, example = "topk(n)", "topk(8)"
    accumulator = "top"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_count(self.n, "topk", "n"))
        self.read_by(positive=True)

    def must_fit(self, grid: Grid) -> None:
        if self.n > grid.Tk:
            raise BadValue(
                f"topk got n={self.n}, and there are {grid.Tk} keys.",
                "the n largest weights are those of n keys.",
                f"pass an n up to {grid.Tk}." if grid.Tk else "ask for it where there are keys.",
            )
        super().must_fit(grid)

    def least_keys(self, p: Problem) -> int:
        # torch.topk sorts in part, 5 to 10 times faster, where a row is 64 times what is taken.
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
            raised = raised.masked_fill(tile.scores == MASKED, MASKED)  # whatever the number is
            return top_of_tile(raised, tile.keys.start, self.n)

        return count

    def finish(self, rows: FinishedRows) -> TopWeights:
        scores, keys = rows.state.more["top"]
        largest = scores[..., :1] if self.by is None else anchor(rows.state.max).unsqueeze(-1)
        below = (scores - largest.detach()).masked_fill(keys < 0, MASKED)
        weights = rows.weight(below.exp().to(rows.share.dtype))
        missing = (0, self.n - keys.shape[-1])
        return TopWeights(F.pad(weights, missing), F.pad(keys, missing, value=-1))
