"""Define sums over groups of keys: of weights, or of weights times a number per key."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from ..masks import Grid, Mask, everything, prefix
from ..masks.key_group import GroupMask, KeyGroup, key_groups
from ..masks.mask import tensors_of
from ..problem.online_softmax import MASKED, WeightedSum
from ..problem.problem import Problem
from .per_key import VALUE, Numbers
from .statistic import FinishedRows, RowStatistic, Tile, zeros

Groups = Mapping[str, "Mask | tuple[int, int]"]


# Attributes of a group statistic that follow from its groups, and are not saved.
FOLLOWING = {"_tensors", "_fits", "_core"}


class GroupStatistic(RowStatistic):
    """A sum for each group of keys, by name: masks, or spans (lo, hi) of keys."""

    groups: Groups  # masks only, after `__post_init__`
    masks: ClassVar[list[Mask]]  # of the groups, in the order of the sums
    of_weights: ClassVar[bool] = True  # are the sums of weights, and not of exp(x - max)?
    _spans: ClassVar[Mapping[str, tuple[int, int]]] = {}  # the groups that are spans

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping) or not self.groups:
            rule = f"{self.name} needs named groups of keys."
            hint = f"pass a dict, for example {self.example}."
            raise BadType(f"{self.name} got {self.groups!r}.", rule, hint)
        masks = {str(name): _group(self.name, name, x) for name, x in self.groups.items()}
        spans = {name: x for name, x in self.groups.items() if not isinstance(x, Mask)}
        object.__setattr__(self, "groups", masks)
        object.__setattr__(self, "masks", [*masks.values()])
        object.__setattr__(self, "_spans", spans)

    def __getstate__(self) -> dict[str, object]:
        return {name: x for name, x in self.__dict__.items() if name not in FOLLOWING}

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return [x for mask in self.masks for x in tensors_of(mask)]

    def _depends_on(self, grid: Grid) -> tuple[object, ...]:
        """Return what checks and key groups depend on: sizes, and how often each tensor of a mask
        was changed in place. It equals no other for inference tensors, whose changes torch does not
        count."""
        try:
            return grid, [x._version for x in self._tensors]
        except RuntimeError:
            return grid, object()

    def check(self, grid: Grid) -> None:
        for mask in self.masks:
            mask.check(grid)

    def must_fit(self, grid: Grid) -> None:
        # A graph cannot store what was checked, and would break here.
        known = None if torch.compiler.is_compiling() else self._depends_on(grid)
        if known is not None and self.__dict__.get("_fits") == known:
            return
        super().must_fit(grid)
        for mask in self.masks:
            mask.must_fit(grid)
        for name, span in self._spans.items():
            if span[1] > grid.Tk:
                gave = f"{self.name} got {span!r} for the group {name!r}: there are {grid.Tk} keys."
                rule = "a span (lo, hi) of keys ends at most at the last key."
                raise BadValue(gave, rule, f"end it at {grid.Tk}, or leave the group out.")
        if known is not None:
            self.__dict__["_fits"] = known

    def with_masks(self, change: Callable[[Mask], Mask]) -> "GroupStatistic":
        groups = {name: change(cast(Mask, mask)) for name, mask in self.groups.items()}
        return replace(self, groups=groups)  # type: ignore[type-var]  # its subclasses are dataclasses

    def key_groups(self, p: Problem) -> list[KeyGroup]:
        return key_groups(self.masks, p.grid, p.device)

    def masks_for_core(self, p: Problem) -> list[GroupMask]:
        """Return the key groups of a call of plain tensors on a CPU as the core reads them.

        The statistic stores the last ones, because reading ten masks takes as long as the core.
        """
        known = self._depends_on(p.grid)
        stored_for, masks = self.__dict__.get("_core", (None, []))
        if stored_for != known:
            groups = self.key_groups(p)
            masks = [group.mask for group in groups]
            if all(group.can_be_stored for group in groups):
                self.__dict__["_core"] = known, masks
        return masks

    def empty(self, p: Problem, queries: int) -> WeightedSum:
        return WeightedSum(zeros(p, queries, len(self.masks)))

    def counter(self, p: Problem) -> Callable[[Tile], WeightedSum]:
        groups = self.key_groups(p)
        factors = None if self.factors is None else self.factors.of(p).unsqueeze(2)

        @lru_cache(maxsize=1)  # the same for all tiles of these queries
        def tiles(start: int, stop: int, width: int) -> list[tuple[list[bool], list[bool]]]:
            return [group.tile_lists(slice(start, stop), width) for group in groups]

        def count(tile: Tile) -> WeightedSum:
            terms, total = tile.exps, tile.sum
            if factors is not None:  # a masked key adds nothing, even if its number is NaN
                terms = (terms * factors[..., tile.keys]).masked_fill(tile.scores == MASKED, 0.0)
                total = terms.sum(-1)
            sums = []
            lists = tiles(tile.queries.start, tile.queries.stop, tile.width)
            for group, (some, full) in zip(groups, lists, strict=True):
                if full[tile.index]:
                    sums.append(total)
                elif some[tile.index]:
                    members = group.to_bool(tile.queries, tile.keys)
                    sums.append(torch.where(members, terms, 0.0).sum(-1))
                else:
                    sums.append(torch.zeros_like(total))
            return WeightedSum(torch.stack(sums, -1))

        return count

    def finish(self, rows: FinishedRows) -> dict[str, Tensor]:
        (sums,) = rows.state.more[self.accumulator]
        return self.of_sums((rows.weight(sums) if self.of_weights else sums).unbind(-1))

    def of_sums(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        """Convert the sums over each group, (B, H, Tq), to this statistic."""
        return dict(zip(self.groups, sums, strict=True))


@dataclass(frozen=True, repr=False)
class mass(GroupStatistic):
    """The weight that each query puts on groups of keys, by name: masks, or spans (lo, hi).

    ``mass({"sink": prefix(1), "local": window(before=15), "title": (3, 9)})``. A span excludes hi,
    which is at most Tk; only in `watch` may a call have fewer keys. A group may depend on the
    query, groups may overlap, and masked keys have no weight.

    In `look`, positions are columns of the call: key 0 is padding if the text is padded on the
    left, or the oldest key in a cache that drops keys. In `watch`, positions count from the first
    token of each text if the call has its padding; ids, as in `documents`, are those of all columns
    also there, with any id for padding.

    Raises `BadType` unless `groups` is a dict with at least one group, and `BadValue` if a group is
    neither a mask nor a span, or does not fit the sizes of a call.
    """

    groups: Groups

    name, formula = "mass", "Σₖ w over the keys that the group allows, for each group"
    call, example = "mass({name: mask})", 'mass({"sink": prefix(1)})'
    accumulator = "groups"


@dataclass(frozen=True, repr=False)
class weighted(GroupStatistic):
    """The sum of weights times a number per key, over groups of keys: Σₖ w n.

    ``weighted(n, {"sink": prefix(1)})``; groups are as in `mass`. By default there is one group,
    "all", with all keys: A @ n. The numbers may have any sign. With n = 1 the sum is `mass`.

    Args:
        by: n, one number for every key: (Tk,), (H, Tk) or (B, H, Tk), without a gradient.
        groups: masks or spans (lo, hi) of keys, by name.

    Raises the errors of `mass`; `BadType` if `by` is not a tensor of real numbers, and `BadValue`
    if it has another shape.
    """

    by: Numbers
    groups: Groups = field(default_factory=lambda: {"all": everything})

    name, formula = "weighted", "Σₖ w n over the keys that the group allows, for each group"
    call, example = "weighted(n, {name: mask})", 'weighted(n, {"sink": prefix(1)})'
    accumulator = "weighted"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.read_by(required=True)


@dataclass(frozen=True, repr=False)
class value_weighted(GroupStatistic):
    """The norm-weighted attention on groups of keys: fractions of what a head writes, by norms.

    It is Σₖ w n over the group, divided by Σₖ w n over all keys, or 0 if that is 0. In `watch`, n
    is ``|v W_O|``, the norm of a key's value after the output projection of the head. A weight on a
    small value adds little to the output: Kobayashi et al. 2020, "Attention is not only a weight".
    Norms ignore that what two keys write may cancel.

    Args:
        groups: masks or spans (lo, hi) of keys, by name, as in `mass`.
        by: other numbers n, 0 or more, for every key. "value" means the norms, and "relative_value"
            those of differences from the value of the first token, both in `watch` only.

    Raises the errors of `mass`; `BadType` if `by` is not a tensor of real numbers, and `BadValue`
    if it has a negative number or another shape, or is a name outside `watch`.
    """

    groups: Groups
    by: Numbers = VALUE

    name, formula = "value_weighted", "Σₖ w n over a group of keys / Σₖ w n"
    call, example = "value_weighted({name: mask})", 'value_weighted({"sink": prefix(1)})'
    accumulator = "value_weighted"
    of_weights = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.masks.append(everything)
        self.read_by(positive=True, required=True)

    def of_sums(self, sums: Sequence[Tensor]) -> dict[str, Tensor]:
        *of_groups, total = sums
        total = total.masked_fill(total == 0, 1.0)
        return dict(zip(self.groups, [x / total for x in of_groups], strict=True))


def _group(statistic: str, name: object, group: object) -> Mask:
    if isinstance(group, Mask):
        return group
    span = [whole_number(i) for i in group] if isinstance(group, (tuple, list)) else []
    if len(span) != 2 or span[0] is None or span[1] is None or not 0 <= span[0] <= span[1]:
        rule = "a group is a mask, or a span (lo, hi) of keys, which excludes hi."
        hint = "pass for example prefix(1), window(before=15) or (3, 9)."
        raise BadValue(f"{statistic} got {group!r} for the group {name!r}.", rule, hint)
    lo, hi = span[0], span[1]
    return prefix(hi) & ~prefix(lo) if lo else prefix(hi)
