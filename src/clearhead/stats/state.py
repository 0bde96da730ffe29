"""The numbers every statistic comes from, and how two sets of them merge.

One sweep over the keys keeps, for each query, sums of exponentials relative to the largest logit
so far (`RowStats`). With x the logits as they enter softmax and m their maximum:

    sum = Σ exp(x - m)    moment = Σ exp(x - m) (x - m)    masses = Σ exp(x - m) over a group

Two sets for different keys merge as softmax does (`online.py`): both move to the larger maximum
M, sums by exp(m - M), the moment by exp(m - M) (moment + (m - M) sum). In the end

    lse = m + log(sum)        weight = exp(x - m) / sum        entropy = log(sum) - moment / sum

A second sweep knows the final sum of a row, hence its weights, and adds those up (`WeightSums`).
A sink takes part in the end, once: with it, `sum` is larger and real weights sum to less than 1.
The running entropy is the textbook identity H = lse - Σ w x; for the merging see Milakov &
Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import online_softmax
from ..problem.online_softmax import NOTHING

LOWEST = -1000.0  # exp of it is 0 even in fp64, and unlike -inf it may be multiplied by 0


class RowStats(NamedTuple):
    """Some queries after some of their keys: (B, H, q) each; None where it was not requested.

    `masses` is (B, H, q, groups). `best` and `where` are (B, H, q, n): the largest logits, and
    their keys; -inf and -1 where there are no more.
    """

    max: Tensor
    sum: Tensor
    moment: Tensor | None = None
    masses: Tensor | None = None
    best: Tensor | None = None
    where: Tensor | None = None


class WeightSums(NamedTuple):
    """Weights of some queries on some keys, added up; None where it was not requested.

    `received` is (B, H, k). `map` is (B, H, query bins, key bins), summed over both. `rows` is
    (B, H, n, k), 0 for a row that is not among the queries.
    """

    received: Tensor | None = None
    map: Tensor | None = None
    rows: Tensor | None = None


class Final(NamedTuple):
    """Rows that have seen every key and the sink: `lse` and `share`, (B, H, q).

    `share` is the weight of a key that scores `rows.max`, so a weight is exp(x - max) * share.
    Both are finite wherever they are differentiated; a blind query has share 0, and -inf for lse
    unless a sink gives it a sum.
    """

    rows: RowStats
    lse: Tensor
    share: Tensor

    def weight(self, part: Tensor) -> Tensor:
        """Sums of exp(x - max), (B, H, q, ...), as weights."""
        return part * self.share.reshape(*self.share.shape, *[1] * (part.dim() - 3))


def exps(scores: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """exp(x - m) and x - m, where what is masked has 0 and a large negative number."""
    base = online_softmax.anchor(top)
    below = (scores - base.unsqueeze(-1)).clamp(min=LOWEST)
    return online_softmax.unseen_are_zero(torch.exp(below), scores, base), below


def merge_rows(a: RowStats, b: RowStats) -> RowStats:
    """The same queries after the keys of both. Associative, commutative, neutral to no keys."""
    top = torch.maximum(a.max, b.max)
    base = online_softmax.anchor(top.detach())
    a, b = moved(a, base), moved(b, base)
    best, where = a.best, a.where
    if best is not None and where is not None and b.best is not None and b.where is not None:
        both = torch.cat([best, b.best], -1), torch.cat([where, b.where], -1)
        best, where = largest(*both, best.shape[-1])
    moment, masses = added(a.moment, b.moment), added(a.masses, b.masses)
    return RowStats(top, a.sum + b.sum, moment, masses, best, where)


def moved(rows: RowStats, base: Tensor) -> RowStats:
    """The sums relative to another maximum, which is a constant for autograd (it cancels)."""
    shift = (rows.max.detach() - base).clamp(min=LOWEST)
    factor = shift.exp()
    moment, masses = rows.moment, rows.masses
    return rows._replace(
        sum=rows.sum * factor,
        moment=None if moment is None else factor * (moment + shift * rows.sum),
        masses=None if masses is None else factor.unsqueeze(-1) * masses,
    )


def finish_rows(rows: RowStats, sinks: Tensor | None) -> Final:
    """Let the sink take part, and divide. `sinks` is (H,), or None."""
    most = top = rows.max.detach()
    sink = None
    if sinks is not None:
        sink = sinks.to(most).unsqueeze(-1)
        top = torch.maximum(most, sink.detach())
    base = online_softmax.anchor(top)
    factor = torch.exp(most - base)
    total = rows.sum * factor
    if sink is not None:
        total = total + torch.exp(sink - base)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    lse = (base + total.log()).masked_fill(blind, NOTHING)
    return Final(rows, lse, factor / total)


def largest(scores: Tensor, keys: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of few candidates, in falling order, ties to the lower key."""
    with torch.no_grad():
        by_key = keys.argsort(-1)
        falling = scores.gather(-1, by_key).argsort(dim=-1, descending=True, stable=True)
        order = by_key.gather(-1, falling)[..., :n]
    return scores.gather(-1, order), keys.gather(-1, order)


def largest_of_tile(scores: Tensor, start: int, n: int) -> tuple[Tensor, Tensor]:
    """The same for a tile of logits (B, H, q, k) whose first key is `start`; padded to n."""
    width = scores.shape[-1]
    with torch.no_grad():
        values, places = scores.topk(min(n + 1, width), -1)
        if width > n:
            # torch.topk takes any of equal scores. Where a tie crosses the edge of the n, the
            # lowest of the tied keys are the n largest of -key among them.
            edge, next_one = values[..., n - 1 : n], values[..., n:]
            values, places = values[..., :n], places[..., :n]
            if bool(((edge == next_one) & (edge != NOTHING)).any()):
                key = torch.arange(width, device=scores.device)
                tied = -torch.where(scores == edge, -key, -width).topk(n, -1).values
                above = (values > edge) | values.isnan()  # torch.topk puts NaN before all numbers
                slot = torch.arange(n, device=scores.device) - above.sum(-1, keepdim=True)
                places = torch.where(slot < 0, places, tied.gather(-1, slot.clamp(min=0)))
    best = scores.gather(-1, places)
    where = (places + start).masked_fill(best == NOTHING, -1)
    best, where = largest(best, where, n)
    short = (0, n - best.shape[-1])
    return F.pad(best, short, value=NOTHING), F.pad(where, short, value=-1)


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b
