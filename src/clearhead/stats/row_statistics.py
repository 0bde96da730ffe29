"""The statistics of a query's weights, which the first sweep knows once all keys have passed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from ..masks import Grid, Mask, prefix
from ..masks.key_ranges import KeyRanges
from ..problem.online_softmax import MASKED, WeightedSum
from ..problem.problem import Problem
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
    """

    n: int

    name, formula, shape = "topk", "the n largest w over k", "B H Tq n"
    call, example = "topk(n)", "topk(8)"
    accumulator = "top"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_count(self.n, "topk", "n"))

    def must_fit(self, grid: Grid) -> None:
        if self.n > grid.Tk:
            raise BadValue(
                f"topk got n={self.n}, and there are {grid.Tk} keys.",
                "the n largest weights are those of n keys.",
                f"pass an n up to {grid.Tk}." if grid.Tk else "ask for it where there are keys.",
            )

    def least_keys(self, p: Problem) -> int:
        # torch.topk sorts in part, 5 to 10 times faster, where a row is 64 times what is taken.
        return 128 * min(self.n, p.Tk)

    def empty(self, p: Problem, queries: int) -> TopScores:
        scores = zeros(p, queries, min(self.n, p.Tk)) + MASKED
        return TopScores(scores, torch.full_like(scores, -1, dtype=torch.long))

    def counter(self, p: Problem) -> Callable[[Tile], TopScores]:
        return lambda tile: top_of_tile(tile.scores, tile.keys.start, self.n)

    def finish(self, rows: FinishedRows) -> TopWeights:
        scores, keys = rows.state.more["top"]
        below = (scores - scores[..., :1].detach()).masked_fill(keys < 0, MASKED)
        weights = rows.weight(below.exp().to(rows.share.dtype))
        missing = (0, self.n - keys.shape[-1])
        return TopWeights(F.pad(weights, missing), F.pad(keys, missing, value=-1))


@dataclass(frozen=True)
class mass(RowStatistic):
    """The weight each query puts on groups of keys: name -> mask, or a span (lo, hi) of keys.

    ``mass({"sink": prefix(1), "local": window(before=15), "title": (3, 9)})``; a span goes up to
    but not including hi, which is at most Tk (in `watch` a call may have fewer keys). A group may
    depend on the query, and groups may overlap; keys the mask masks have no weight in any group. In
    `look`, positions are those of the call's own keys: key 0 is padding if the text is padded on
    the left, and the oldest key kept if a cache drops what a window has passed. In `watch` they
    count from the first token of each text, where the call carries its padding.
    """

    groups: Mapping[str, "Mask | tuple[int, int]"]
    _spans: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    name, formula = "mass", "Σₖ w over the keys that the group allows, for each group"
    call, example = "mass({name: mask})", 'mass({"sink": prefix(1)})'
    accumulator = "groups"

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping) or not self.groups:
            raise BadType(
                f"mass got {self.groups!r}.",
                "mass sums weights over named groups of keys.",
                'pass a dict, for example mass({"sink": prefix(1), "title": (3, 9)}).',
            )
        masks = {str(name): _group(name, group) for name, group in self.groups.items()}
        spans = {name: x for name, x in self.groups.items() if not isinstance(x, Mask)}
        object.__setattr__(self, "groups", masks)
        object.__setattr__(self, "_spans", spans)

    @property
    def masks(self) -> list[Mask]:
        return [group for group in self.groups.values() if isinstance(group, Mask)]

    def check(self, grid: Grid) -> None:
        for mask in self.masks:
            mask.check(grid)

    def must_fit(self, grid: Grid) -> None:
        for mask in self.masks:
            mask.must_fit(grid)
        for name, span in self._spans.items():
            if span[1] > grid.Tk:
                raise BadValue(
                    f"mass got {span!r} for the group {name!r}, and there are {grid.Tk} keys.",
                    "a span (lo, hi) of keys ends at the last key at most.",
                    f"end it at {grid.Tk}, or leave the group out.",
                )

    def with_masks(self, change: Callable[[Mask], Mask]) -> "mass":
        return mass({name: change(_group(name, x)) for name, x in self.groups.items()})

    def ranges(self, p: Problem) -> list[KeyRanges]:
        return [mask.key_ranges(p.grid, p.device) for mask in self.masks]

    def empty(self, p: Problem, queries: int) -> WeightedSum:
        return WeightedSum(zeros(p, queries, len(self.groups)))

    def counter(self, p: Problem) -> Callable[[Tile], WeightedSum]:
        groups = self.ranges(p)

        @lru_cache(maxsize=1)  # the same for all tiles of these queries
        def tiles(start: int, stop: int, width: int) -> list[tuple[list[bool], list[bool]]]:
            return [ranges.tile_lists(slice(start, stop), width) for ranges in groups]

        def count(tile: Tile) -> WeightedSum:
            sums = []
            lists = tiles(tile.queries.start, tile.queries.stop, tile.width)
            for ranges, (some, full) in zip(groups, lists, strict=True):
                if full[tile.index]:
                    sums.append(tile.sum)
                elif some[tile.index]:
                    sums.append((tile.exps * ranges.to_bool(tile.queries, tile.keys)).sum(-1))
                else:
                    sums.append(torch.zeros_like(tile.sum))
            return WeightedSum(torch.stack(sums, -1))

        return count

    def finish(self, rows: FinishedRows) -> dict[str, Tensor]:
        (sums,) = rows.state.more["groups"]
        return dict(zip(self.groups, rows.weight(sums).unbind(-1), strict=True))


def _group(name: object, group: object) -> Mask:
    if isinstance(group, Mask):
        return group
    span = [whole_number(i) for i in group] if isinstance(group, (tuple, list)) else []
    if len(span) != 2 or span[0] is None or span[1] is None or not 0 <= span[0] <= span[1]:
        raise BadValue(
            f"mass got {group!r} for the group {name!r}.",
            "a group is a mask, or a span (lo, hi) of keys from lo up to but not including hi.",
            "pass for example prefix(1), window(before=15) or (3, 9).",
        )
    lo, hi = span[0], span[1]
    return prefix(hi) & ~prefix(lo) if lo else prefix(hi)
