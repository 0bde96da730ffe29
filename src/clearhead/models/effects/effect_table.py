"""The effects of edits on a metric, as data and as a table."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...core.errors import must_be_among
from ...core.torch_state import loadable

MOST_SHOWN = 20
MARK = "?"  # marks an estimate that the exact effect does not confirm
UNCHECKED = (
    "These estimates are not checked. If the metric is saturated, one may be far too small and of\n"
    "the wrong sign; exact=True measures each effect."
)


@loadable
@dataclass(frozen=True)
class Effect:
    """The effect of one edit on the metric: edited minus unedited.

    `exact` was measured by running the edited model, and `estimate` was computed from gradients of
    the unedited one; None if not requested, and for a path. `layer`, `head` and `position` are set
    for an edit of one of them; for a path they are its sender's, and `receiver` is the layer and
    head that reads. `label` describes what the head looks at, if known.
    """

    name: str
    exact: float | None
    estimate: float | None
    layer: int | None = None
    head: int | None = None
    label: str = ""
    position: int | None = None
    receiver: tuple[int, int] | None = None

    @property
    def trusted(self) -> bool | None:
        """Whether the exact effect confirms the estimate: the same sign, within a factor of 2.

        None if one of them is missing, so that the estimate is not checked.

        Where a loss is saturated, its gradient vanishes, and an estimate may be far too small and
        of the wrong sign. Only the edited run shows this, not the gradient at the same point.
        """
        if self.exact is None or self.estimate is None:
            return None
        return abs(self.exact - self.estimate) <= max(abs(self.exact), abs(self.estimate)) / 2

    @property
    def size(self) -> float:
        """The absolute value of the exact effect, or of the estimate if that is missing."""
        return abs(self.exact if self.exact is not None else self.estimate or 0.0)


@loadable
@dataclass(frozen=True)
class Effects:
    """The effect of each edit on `metric`, which is `baseline` without edits.

    Printed as a table, the largest first.
    """

    metric: str
    baseline: float
    effects: tuple[Effect, ...]

    def __len__(self) -> int:
        return len(self.effects)

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)

    def largest(self) -> list[Effect]:
        """Return the effects sorted by size, the largest first, and NaN before all numbers."""
        return sorted(self.effects, key=lambda effect: (effect.size == effect.size, -effect.size))

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation of estimates and exact effects.

        None if either is missing, or all are equal.
        """
        pairs = [(e.exact, e.estimate) for e in self.effects if e.trusted is not None]
        if len(pairs) < 2:
            return None
        numbers = torch.tensor(pairs, dtype=torch.float64).T
        rho = float(torch.corrcoef(torch.stack([*map(_ranks, numbers)]))[0, 1])
        return None if math.isnan(rho) else rho

    @property
    def axes(self) -> tuple[str, ...]:
        """What the dimensions of `grid` are: "layer" and "head", "layer" and "position", ...

        Those that most effects have; () if none has any. "receiver" is one if there are several.
        """
        several = len(self.receivers) > 1
        sites = Counter(axes for e in self.effects if (axes := _axes_of(e, several)))
        return max(sites, key=lambda axes: (len(axes) > 1, sites[axes]), default=())

    @property
    def receivers(self) -> tuple[tuple[int, int], ...]:
        """The (layer, head) of each receiver of paths, as in the last dimension of `grid`."""
        return tuple(sorted({e.receiver for e in self.effects if e.receiver is not None}))

    def grid(self, which: str = "exact") -> Tensor:
        """Return the effects by their `axes`, such as (layers, heads), NaN where missing.

        `which` is "exact" or "estimate".
        """
        rule, hint = "a grid has the exact effects or the estimates.", "pass 'exact' or 'estimate'."
        must_be_among(("exact", "estimate"), "grid got which", which, rule, hint)
        axes = self.axes
        if not axes:
            return torch.zeros(0, 0, dtype=torch.float64)
        columns = {receiver: column for column, receiver in enumerate(self.receivers)}
        cells: dict[tuple[int, ...], float | None] = {}
        for e in self.effects:
            if _axes_of(e, len(columns) > 1) == axes:
                at = (getattr(e, axis) for axis in axes)
                cells[tuple(columns.get(x, x) for x in at)] = getattr(e, which)
        sizes = [max(at) + 1 for at in zip(*cells, strict=True)]
        grid = torch.full(sizes, math.nan, dtype=torch.float64)
        for site, value in cells.items():
            grid[site] = math.nan if value is None else value
        return grid

    def labelled(self, labels: Mapping[tuple[int, int], str]) -> "Effects":
        """Return the effects with `labels`, what heads look at, by (layer, head)."""
        heads: Mapping[Any, str] = labels  # an effect may have no layer or head
        named = (replace(e, label=heads.get((e.layer, e.head), e.label)) for e in self.effects)
        return replace(self, effects=tuple(named))

    def as_dict(self) -> dict[str, Any]:
        effects = [{**asdict(effect), "trusted": effect.trusted} for effect in self.effects]
        return {**asdict(self), "effects": effects, "correlation": self.correlation}

    def __str__(self) -> str:
        return self.table(MOST_SHOWN)

    def table(self, most: int | None = None) -> str:
        """Return the largest `most` effects as a table; None means all."""
        ranked = self.largest()[:most]
        wide = max([len(e.name) for e in ranked], default=0)
        columns = [
            c for c in ("exact", "estimate") if any(getattr(e, c) is not None for e in ranked)
        ]
        lines = [f"{self.metric} is {self.baseline:.4f} unedited; edited minus unedited:", ""]
        lines.append(" " * wide + "".join(f"{c:>12}" for c in columns))
        for e in ranked:
            numbers = "".join(_cell(getattr(e, c)) for c in columns)
            mark = MARK if e.trusted is False else " "
            lines.append(f"{e.name:<{wide}}{numbers} {mark} {e.label}".rstrip())
        if len(ranked) < len(self.effects):
            lines.append(f"... and {len(self.effects) - len(ranked)} smaller ones")
        if (rho := self.correlation) is not None:
            lines += ["", f"Estimates and exact effects: rank correlation {rho:.3f}."]
        if wrong := sum(e.trusted is False for e in self.effects):
            lines.append(
                f"{MARK} {wrong} of {len(self.effects)} estimates are not to be trusted: of the "
                "wrong sign, or off by\n  more than a factor of 2."
            )
        if any(e.estimate is not None and e.trusted is None for e in self.effects):
            lines += ["", UNCHECKED]
        return "\n".join(lines)


def _axes_of(effect: Effect, several_receivers: bool) -> tuple[str, ...]:
    names = "layer", "head", "position", *(["receiver"] if several_receivers else [])
    return tuple(name for name in names if getattr(effect, name) is not None)


def _cell(value: float | None) -> str:
    return f"{'' if value is None else f'{value:+.4f}':>12}"


def _ranks(x: Tensor) -> Tensor:
    """Return the rank of each number; equal numbers get the mean of their ranks."""
    below = (x.unsqueeze(0) < x.unsqueeze(1)).sum(1).double()
    equal = (x.unsqueeze(0) == x.unsqueeze(1)).sum(1).double()
    return below + (equal - 1) / 2
