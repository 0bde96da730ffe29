"""Sums over groups of keys in the first sweep: of weights, or of weights times numbers per key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from ..masks import Grid, Mask, everything, prefix
from ..masks.key_ranges import KeyRanges
from ..problem.online_softmax import MASKED, WeightedSum
from ..problem.problem import Problem
from .per_key import VALUE, Numbers
from .statistic import FinishedRows, RowStatistic, Tile, zeros

Groups = Mapping[str, "Mask | tuple[int, int]"]


class GroupStatistic(RowStatistic):
    """A sum for each group of keys: name -> mask, or a span (lo, hi) of keys."""

    groups: Groups  # masks only, after `__post_init__`
    _spans: ClassVar[
        Mapping[str, tuple[int, int]]
    ] = {}  # those that were given as spans; of each statistic

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping) or not self.groups:
            raise BadType(
                f"{self.name} got {self.groups!r}.",
                f"{self.name} sums over named groups of keys.",
                f"pass a dict, for example {self.example}.",
            )
        masks = {str(name): _group(self.name, name, x) for name, x in self.groups.items()}
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
        super().must_fit(grid)
        for mask in self.masks:
            mask.must_fit(grid)
        for name, span in self._spans.items():
            if span[1] > grid.Tk:
                raise BadValue(
                    f"{self.name} got {span!r} for the group {name!r}: there are {grid.Tk} keys.",
                    "a span (lo, hi) of keys ends at the last key at most.",
                    f"end it at {grid.Tk}, or leave the group out.",
                )

    def with_masks(self, change: Callable[[Mask], Mask]) -> "GroupStatistic":
        groups = {name: change(cast(Mask, mask)) for name, mask in self.groups.items()}
        return replace(self, groups=groups)  # type: ignore[type-var]  # its subclasses are dataclasses

    def ranges(self, p: Problem) -> list[KeyRanges]:
        return [mask.key_ranges(p.grid, p.device) for mask in self.masks]

    def empty(self, p: Problem, queries: int) -> WeightedSum:
        return WeightedSum(zeros(p, queries, len(self.masks)))

    def counter(self, p: Problem) -> Callable[[Tile], WeightedSum]:
        groups = self.ranges(p)
        factors = None if self.factors is None else self.factors.of(p).unsqueeze(2)

        @lru_cache(maxsize=1)  # the same for all tiles of these queries
        def tiles(start: int, stop: int, width: int) -> list[tuple[list[bool], list[bool]]]:
            return [ranges.tile_lists(slice(start, stop), width) for ranges in groups]

        def count(tile: Tile) -> WeightedSum:
            terms, total = tile.exps, tile.sum
            if factors is not None:  # a masked key adds nothing, even if its number is NaN
                terms = (terms * factors[..., tile.keys]).masked_fill(tile.scores == MASKED, 0.0)
                total = terms.sum(-1)
            sums = []
            lists = tiles(tile.queries.start, tile.queries.stop, tile.width)
            for ranges, (some, full) in zip(groups, lists, strict=True):
                if full[tile.index]:
                    sums.append(total)
                elif some[tile.index]:
                    members = ranges.to_bool(tile.queries, tile.keys)
                    sums.append(torch.where(members, terms, 0.0).sum(-1))
                else:
                    sums.append(torch.zeros_like(total))
            return WeightedSum(torch.stack(sums, -1))

        return count

    def finish(self, rows: FinishedRows) -> dict[str, Tensor]:
        (sums,) = rows.state.more[self.accumulator]
        return dict(zip(self.groups, rows.weight(sums).unbind(-1), strict=True))


@dataclass(frozen=True)
class mass(GroupStatistic):
    """The weight each query puts on groups of keys: name -> mask, or a span (lo, hi) of keys.

    ``mass({"sink": prefix(1), "local": window(before=15), "title": (3, 9)})``; a span goes up to
    but not including hi, which is at most Tk (in `watch` a call may have fewer keys). A group may
    depend on the query, and groups may overlap; keys the mask masks have no weight in any group. In
    `look`, positions are those of the call's own keys: key 0 is padding if the text is padded on
    the left, and the oldest key kept if a cache drops what a window has passed. In `watch` they
    count from the first token of each text, where the call carries its padding.
    """

    groups: Groups

    name, formula = "mass", "Σₖ w over the keys that the group allows, for each group"
    call, example = "mass({name: mask})", 'mass({"sink": prefix(1)})'
    accumulator = "groups"


@dataclass(frozen=True)
class weighted(GroupStatistic):
    """Sums of weights times a number per key, over groups of keys: Σₖ w n.

    ``weighted(n, {"sink": prefix(1)})``; groups as in `mass`. Without `groups` there is one, "all",
    with every key: A @ n. The numbers may have any sign. With n = 1 it is `mass`.

    Args:
        by: n, one number for every key: (Tk,), (H, Tk) or (B, H, Tk). It receives no gradient.
        groups: name -> mask, or a span (lo, hi) of keys. None means all keys, as "all".
    """

    by: Numbers
    groups: Groups = field(default_factory=lambda: {"all": everything})

    name, formula = "weighted", "Σₖ w n over the keys that the group allows, for each group"
    call, example = "weighted(n, {name: mask})", 'weighted(n, {"sink": prefix(1)})'
    accumulator = "weighted"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read_by()


@dataclass(frozen=True)
class value_weighted(GroupStatistic):
    """The fraction of what a head moves that comes from each group of keys.

    In `watch`, with n the norm of what the value of a key writes through the output projection of
    the head, |v W_O|, it is Σₖ w n over the group, divided by Σₖ w n over all keys; 0 where no key
    has both. A weight on a key with a small value moves little: Kobayashi et al. 2020, "Attention
    is not only a weight". Norms ignore that sources may cancel each other.

    Args:
        groups: name -> mask, or a span (lo, hi) of keys, as in `mass`.
        by: other numbers n, 0 or more, for every key; "value" takes the norms, in `watch` only.
    """

    groups: Groups
    by: Numbers = VALUE

    name, formula = "value_weighted", "Σₖ w n over a group of keys / Σₖ w n"
    call, example = "value_weighted({name: mask})", 'value_weighted({"sink": prefix(1)})'
    accumulator = "value_weighted"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read_by(positive=True)

    @property
    def masks(self) -> list[Mask]:
        return [*super().masks, everything]

    def finish(self, rows: FinishedRows) -> dict[str, Tensor]:
        (sums,) = rows.state.more[self.accumulator]
        *of_groups, total = sums.unbind(-1)
        nothing = total == 0
        fractions = (x / total.masked_fill(nothing, 1.0) for x in of_groups)
        return dict(zip(self.groups, fractions, strict=True))


def _group(statistic: str, name: object, group: object) -> Mask:
    if isinstance(group, Mask):
        return group
    span = [whole_number(i) for i in group] if isinstance(group, (tuple, list)) else []
    if len(span) != 2 or span[0] is None or span[1] is None or not 0 <= span[0] <= span[1]:
        raise BadValue(
            f"{statistic} got {group!r} for the group {name!r}.",
            "a group is a mask, or a span (lo, hi) of keys from lo up to but not including hi.",
            "pass for example prefix(1), window(before=15) or (3, 9).",
        )
    lo, hi = span[0], span[1]
    return prefix(hi) & ~prefix(lo) if lo else prefix(hi)
