"""The statistics of attention weights, one class for each.

A statistic has a name, a formula, the shape of its result, and the sweep it needs: the "first"
accumulates sums of each row, the "second" sums of the weights, for which those of the rows must be
final. It computes its result from the sums in `state.py`, whether the core or torch accumulated
them. Letters as in `problem.py`; w are the weights, without dropout, x the logits as they enter
softmax.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import BadType, BadValue, as_count, whole_number
from ..masks import Grid, Mask, prefix
from ..masks.values import Align
from .state import Final, WeightSums


class Top(NamedTuple):
    """The largest weights of each query and the keys they lie on, (B, H, Tq, n) both."""

    weights: Tensor
    keys: Tensor


Result: TypeAlias = Tensor | Top | dict[str, Tensor]


def each(result: Result, change: Callable[[Tensor], Tensor]) -> Result:
    """The result with every tensor in it changed."""
    if isinstance(result, Top):
        return Top(*(change(x) for x in result))
    if isinstance(result, dict):
        return {name: change(x) for name, x in result.items()}
    return change(result)


class Statistic(ABC):
    """One question about the weights."""

    name: ClassVar[str]
    sweep: ClassVar[str]
    formula: ClassVar[str]
    shape: ClassVar[str] = "B H Tq"

    def check(self, grid: Grid) -> None:  # noqa: B027 (most statistics fit every grid)
        """Raise `BadValue` if it has no meaning for these sizes."""

    def with_align(self, align: Align) -> "Statistic":
        """The same statistic; masks in it without an `align` of their own take this one."""
        return self


class RowStatistic(Statistic):
    """It is known once the row is: from the sums of the first sweep."""

    sweep = "first"

    @abstractmethod
    def finish(self, final: Final) -> Result: ...


class SumStatistic(Statistic):
    """It adds up weights, so it needs a second sweep, after the sum of each row is known."""

    sweep = "second"

    @abstractmethod
    def finish(self, sums: WeightSums, grid: Grid, queries: Tensor) -> Result:
        """The result for the `queries` (their positions) that were swept."""


# -------------------------------------------------------------------- first sweep, beside the rows


@dataclass(frozen=True)
class LogSumExp(RowStatistic):
    """The natural log-sum-exp of the logits, sink included; -inf if there is nothing to sum."""

    name, formula = "lse", "log Σₖ exp(x)"

    def finish(self, final: Final) -> Tensor:
        return final.lse


@dataclass(frozen=True)
class Largest(RowStatistic):
    """The largest logit over the keys (the sink is no key); -inf for a blind query."""

    name, formula = "max", "maxₖ x"

    def finish(self, final: Final) -> Tensor:
        return final.rows.max


@dataclass(frozen=True)
class Entropy(RowStatistic):
    """How spread the weights are, in nats: 0 on one key, log n on n keys alike, 0 if blind."""

    name, formula = "entropy", "-Σₖ w log w"

    def finish(self, final: Final) -> Tensor:
        # With p = exp(x - m) and w = p share:  -Σ w log w = share (-log share Σ p - Σ p (x - m)).
        share = final.share
        assert final.rows.moment is not None
        gap = -share.masked_fill(share == 0, 1.0).log()
        # Of rounding alone it may come out as -1e-8, and of one key as -0.
        return (share * (gap * final.rows.sum - final.rows.moment)).clamp(min=0) + 0.0


@dataclass(frozen=True)
class Effective(RowStatistic):
    """How many equal weights would be as spread: exp(entropy), so 1 where the entropy is 0."""

    name, formula = "effective", "exp(entropy)"

    def finish(self, final: Final) -> Tensor:
        return Entropy().finish(final).exp()


@dataclass(frozen=True)
class topk(RowStatistic):
    """The `n` largest weights of each query, in falling order, ties to the lower key.

    They are ordered by logit, so weights too small to tell from 0 keep their order. Where fewer
    keys are allowed, the weight is 0 and the key -1.
    """

    n: int

    name, formula, shape = "topk", "the n largest w over k", "B H Tq n"

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count(self.n, "topk", "n"))

    def finish(self, final: Final) -> Top:
        best, where = final.rows.best, final.rows.where
        assert best is not None and where is not None
        below = (best - best[..., :1].detach()).masked_fill(where < 0, float("-inf"))
        return Top(final.weight(below.exp().to(final.share.dtype)), where)


@dataclass(frozen=True)
class mass(RowStatistic):
    """The weight each query puts on groups of keys: name -> mask, or a span (lo, hi) of keys.

    ``mass({"sink": prefix(1), "local": window(before=15), "title": (3, 9)})``; a span goes up to
    but not including hi. A group may depend on the query, and groups may overlap; keys the question
    masks have no weight in any group. Positions are those of the call's own keys: key 0 is padding
    if the text is padded on the left, and the oldest key kept if a cache drops what a window has
    passed.
    """

    groups: Mapping[str, "Mask | tuple[int, int]"]

    name, formula = "mass", "Σₖ w over the keys that the group allows, for each group"

    def __post_init__(self) -> None:
        if not isinstance(self.groups, Mapping) or not self.groups:
            raise BadType(
                f"mass got {self.groups!r}.",
                "mass sums weights over named groups of keys.",
                'pass a dict, for example mass({"sink": prefix(1), "title": (3, 9)}).',
            )
        masks = {str(name): _group(name, group) for name, group in self.groups.items()}
        object.__setattr__(self, "groups", masks)

    @property
    def masks(self) -> list[Mask]:
        return [group for group in self.groups.values() if isinstance(group, Mask)]

    def check(self, grid: Grid) -> None:
        for mask in self.masks:
            mask.check(grid)

    def with_align(self, align: Align) -> "mass":
        return mass({name: _group(name, x).with_align(align) for name, x in self.groups.items()})

    def finish(self, final: Final) -> dict[str, Tensor]:
        assert final.rows.masses is not None
        return dict(zip(self.groups, final.weight(final.rows.masses).unbind(-1), strict=True))


# ------------------------------------------------------------- second sweep, over finished weights


@dataclass(frozen=True)
class Received(SumStatistic):
    """The weight each key receives, summed over the queries, per query head."""

    name, formula, shape = "received", "Σ_q w", "B H Tk"

    def finish(self, sums: WeightSums, grid: Grid, queries: Tensor) -> Tensor:
        assert sums.received is not None
        return sums.received


@dataclass(frozen=True)
class map(SumStatistic):
    """The matrix pooled: the mean, over the queries of a bin, of the weight on a bin of keys.

    T positions fall into n bins as evenly as they can: bin i holds those from floor(i T / n) up to
    floor((i + 1) T / n). There are never more bins than positions, so a short text is shown as it
    is. Every row of the map sums to 1, like a row of weights (less what a sink takes and blind
    queries miss).
    """

    rows: int
    cols: int

    name, formula = "map", "mean over the queries of a bin of Σ w over a bin of keys"
    shape = "B H min(rows,Tq) min(cols,Tk)"

    def __post_init__(self) -> None:
        for side in ("rows", "cols"):
            object.__setattr__(self, side, _count(getattr(self, side), "map", side))

    def finish(self, sums: WeightSums, grid: Grid, queries: Tensor) -> Tensor:
        assert sums.map is not None
        bins = min(self.rows, grid.Tq)
        count = torch.bincount(bin_of(queries, grid.Tq, bins), minlength=bins).clamp(min=1)
        return sums.map / count.to(sums.map).unsqueeze(-1)


@dataclass(frozen=True)
class rows(SumStatistic):
    """The exact weights of some queries, in the order asked for; -1 is the last query."""

    queries: Sequence[int]

    name, formula, shape = "rows", "w of the queries asked for", "B H n Tk"

    def __post_init__(self) -> None:
        given = self.queries
        listed = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
        places = [whole_number(i) for i in given] if listed else [None]
        if None in places:
            raise BadType(
                f"rows got {given!r}.",
                "rows takes the positions of queries, whole numbers in a list.",
                "pass for example rows([0, 5, -1]).",
            )
        object.__setattr__(self, "queries", tuple(places))

    def check(self, grid: Grid) -> None:
        for i in self.queries:
            if not -grid.Tq <= i < grid.Tq:
                raise BadValue(
                    f"rows asks for query {i}, and there are {grid.Tq}.",
                    "positions count from 0 and stay below the size; -1 is the last.",
                    f"ask for queries from {-grid.Tq} to {grid.Tq - 1}."
                    if grid.Tq
                    else "ask for no rows, rows([]).",
                )

    def places(self, grid: Grid) -> list[int]:
        return [i % grid.Tq for i in self.queries]

    def finish(self, sums: WeightSums, grid: Grid, queries: Tensor) -> Tensor:
        """Only the rows that are among the queries."""
        assert sums.rows is not None
        places = torch.tensor(self.places(grid), dtype=torch.long, device="cpu")
        held = torch.isin(places, queries.cpu())
        return sums.rows if bool(held.all()) else sums.rows[:, :, held.to(sums.rows.device)]


def bin_of(positions: Tensor, size: int, bins: int) -> Tensor:
    """The bin of each position: the i with floor(i size / bins) <= position < the next."""
    return ((positions + 1) * bins - 1) // max(size, 1)


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


def _count(value: object, statistic: str, name: str) -> int:
    rule = f"{name} says how many, a whole number, 1 or more."
    return as_count(f"{statistic} got {name}", value, rule, f"pass for example {name}=8.", least=1)
