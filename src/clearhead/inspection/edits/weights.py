"""Edits that make another problem: other edges, other logits."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ...errors import BadType, BadValue, kind_of
from ...errors.limits import MASKS_KEPT
from ...masks import Dense, Mask, intersect
from ...masks.without import WithoutEdges, edges_in_call
from ...problem.biases import Alibi, TensorBias
from ...problem.problem import Inputs, Problem
from ...torch_state import has_values
from ..text_stack import names_lengths
from .edit import Edit, Here, finite_number

MOST_SHOWN = 80  # letters of a mask in what an edit prints


@dataclass(frozen=True, eq=False, repr=False)
class knock_out(Edit):
    """The edges that `mask` allows are not there: their weights are 0 and the others of the query
    renormalise. A query that has no edge left gives 0.

    >>> import clearhead as ch
    >>> ch.edits.knock_out(ch.prefix(1), layers=[5])  # no head of layer 5 looks at the first token
    knock_out(prefix(1), layers=[5])

    Rules over positions that leave `align` open stand where the call's own mask lets the queries
    stand, so they follow a cache. A mask of T x T (`documents`, `dense`) is about a text of T
    tokens from its first on: it follows a cache too, and edges to what comes after stay; with cells
    for each text of a batch, it is about the columns of that batch. Keys are counted from the first
    of the text, also where a cache has dropped it, and where the text is padded on the left.

    Where it removes no edge that was visible, the record of `intervene` says so.
    """

    mask: Mask
    _made: list[tuple[Mask, object, "_Edited"]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mask, Mask):
            raise BadType(
                f"{type(self).__name__} got {kind_of(self.mask)}.",
                "which edges an edit is about is a mask.",
                "pass for example clearhead.prefix(1), or clearhead.dense(keep=booleans).",
            )

    def arguments(self) -> list[str]:
        shown = repr(self.mask)
        if len(shown) <= MOST_SHOWN:
            return [shown]
        if isinstance(self.mask, Dense) and has_values(bits := self.mask.bits):
            return [f"dense(keep=<{int(bits.sum())} of {bits.numel()} cells>)"]
        return [f"{shown[: MOST_SHOWN - 3]}..."]

    def removed(self) -> Mask:
        """The edges that go."""
        return self.mask

    def for_copy(self, batch: range) -> Edit | None:
        return None if "B" in self.mask.sizes() else super().for_copy(batch)

    def edit_problem(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        rule, grid = problem.mask, problem.grid
        at = grid, problem.device, here.at
        for known, place, edited in self._made:
            if place == at and known.equals(rule, read=False):
                return replace(problem, mask=edited.mask), inputs
        where = self.where(problem, here)
        edges = edges_in_call(self.removed(), grid, here.at)
        if where is None and names_lengths(~edges, grid):
            where = torch.ones(1, 1, 1, dtype=torch.bool)  # else they would be read as padding
        mask = (
            intersect(rule, ~edges)
            if where is None
            else WithoutEdges(rule, edges, where, repr(self))
        )
        self._made.append((rule, at, _Edited(mask, _counts_differ(problem, mask))))
        del self._made[:-MASKS_KEPT]
        return replace(problem, mask=mask), inputs

    def removes_an_edge(self, before: Problem, after: Problem) -> bool:
        edited = (e for *_, e in self._made if e.mask is after.mask)
        if before.mask is after.mask or not next(edited).removes:
            return False
        if not isinstance(before.bias, TensorBias) or not has_values(before.bias.tensor):
            return True
        # A model may hide keys by adding the lowest number there is to their scores.
        numbers = before.bias.as_4d()
        seen = numbers > torch.finfo(numbers.dtype).min
        return bool((before.key_ranges.to_bool() & ~after.key_ranges.to_bool() & seen).any())


class _Edited(NamedTuple):
    """An edited mask, and whether it removes an edge that the mask before it allows."""

    mask: Mask
    removes: bool


def _counts_differ(problem: Problem, edited: Mask) -> bool:
    """Does the edited mask, which allows no other keys, allow fewer?"""
    before, after = (
        problem.key_ranges,
        edited.key_ranges(problem.grid, problem.key_ranges.lo.device),
    )
    if not has_values(before.lo, after.lo):
        return True
    return bool((before.keys_per_query() != after.keys_per_query()).any())


class keep_only(knock_out):
    """Only the edges that `mask` allows are there, of those that the model's own mask allows: the
    same as ``knock_out(~mask)``, whose words on `align` and T x T hold here."""

    def removed(self) -> Mask:
        return ~self.mask


@dataclass(frozen=True, eq=False, repr=False)
class temperature(Edit):
    """w = softmax(x / t): below 1 the weights sharpen, above 1 they even out. All that enters the
    softmax is divided: x after scale, soft cap and bias, and a sink's logit.

    Raises `BadValue` unless t > 0; and in a call with sinks or ALiBi where it names rows, or with a
    soft cap where it names heads or rows: no one call says so.
    """

    t: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "t", finite_number("temperature", "t", self.t))
        if self.t <= 0:
            raise BadValue(
                f"temperature got t={self.t:g}.",
                "logits are divided by t, which is positive.",
                "pass t > 0; uniform() gives equal weights.",
            )

    def arguments(self) -> list[str]:
        return [f"{self.t:g}"]

    def for_copy(self, batch: range) -> Edit | None:
        return None  # under a soft cap or with sinks it applies to whole layers or heads

    def edit_problem(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        factor, softcap = 1 / self.t, problem.softcap
        by_row = self.rows is not None or self.batch is not None
        if softcap is not None:
            if by_row or self.heads is not None:
                raise _not_one_problem(self, "a soft cap", "name no heads, rows or batch.")
            problem = replace(problem, scale=problem.scale / self.t, softcap=softcap / self.t)
        else:
            q = inputs.q * self.factors(factor, problem, here).unsqueeze(-1)
            inputs = inputs._replace(q=q.to(inputs.q.dtype))
        sinks = problem.sinks
        if sinks is not None:
            _must_be_whole(self, by_row, "sinks")
            sinks = sinks * self.factors(factor, problem, here).flatten()
        return _with_bias(self, factor, replace(problem, sinks=sinks), here), inputs


@dataclass(frozen=True, eq=False, repr=False)
class uniform(Edit):
    """w = 1/n for each of the n keys that the query may look at; a sink takes nothing.

    Raises `BadValue` in a call with sinks or ALiBi where it names rows: no one call says so.
    """

    def for_copy(self, batch: range) -> Edit | None:
        return None  # with sinks it applies to whole heads

    def edit_problem(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        where = self.factors(0.0, problem, here) == 0
        inputs = inputs._replace(q=inputs.q.masked_fill(where.unsqueeze(-1), 0.0))
        sinks = problem.sinks
        if sinks is not None:
            _must_be_whole(self, self.rows is not None or self.batch is not None, "sinks")
            sinks = sinks.masked_fill(where.flatten(), -math.inf)
        return _with_bias(self, 0.0, replace(problem, sinks=sinks), here), inputs


def _with_bias(edit: Edit, factor: float, problem: Problem, here: Here) -> Problem:
    """The problem with its bias times the factor, for the queries that the edit is about."""
    bias = problem.bias
    if bias is None:
        return problem
    factors = edit.factors(factor, problem, here)
    if isinstance(bias, Alibi):
        _must_be_whole(edit, edit.rows is not None or edit.batch is not None, "ALiBi")
        slopes = bias.of(problem.grid)
        return replace(problem, bias=Alibi(slopes * factors.flatten().to(slopes), bias.align))
    assert isinstance(bias, TensorBias)
    scaled = bias.as_4d() * factors.unsqueeze(-1)
    return replace(problem, bias=TensorBias(scaled.to(bias.tensor.dtype)))


def _must_be_whole(edit: Edit, by_row: bool, what: str) -> None:
    if by_row:
        raise _not_one_problem(edit, what, "name no rows and no batch: heads can be named.")


def _not_one_problem(edit: Edit, what: str, hint: str) -> BadValue:
    return BadValue(
        f"{edit!r} was applied to a layer with {what}.",
        f"the edited call has {what} that is the same for all it is about.",
        hint,
    )
