"""Edits that change the problem: its edges or its logits."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ....core.errors import BadValue, must_be_of
from ....core.errors.limits import MASKS_KEPT
from ....core.masks import Dense, Mask, intersect
from ....core.masks.without import WithoutEdges, edges_in_call
from ....core.problem.biases import Alibi, TensorBias
from ....core.problem.problem import Inputs, Problem
from ....core.torch_state import has_values
from ...follow.text_stack import names_lengths
from .edit import Edit, Edited, EditSite, finite_number

MOST_SHOWN = 80  # characters of a mask in the repr of an edit


@dataclass(frozen=True, eq=False, repr=False)
class knock_out(Edit):
    """Remove the edges that `mask` allows.

    Their weights are 0, and the other weights of the query are renormalised. The output of a query
    without edges is 0.

    >>> import clearhead as ch
    >>> ch.edits.knock_out(ch.prefix(1), layers=[5])  # no head of layer 5 looks at the first token
    knock_out(prefix(1), layers=[5])

    Masks over positions without `align` take the alignment of the call's own mask, so they stay
    correct with a KV cache. A T x T mask (`documents`, `dense`) applies to the first T tokens of
    the text, with a cache too, and later edges stay; if it has cells for each text of a batch, it
    applies to the columns of that batch. Keys count from the first of the text, even if a cache
    has dropped it, and if the text is padded on the left.

    Args:
        mask: the edges to remove.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    If no visible edge was removed, the `Intervention` reports it. Raises `BadType` unless `mask` is
    a mask, and `BadValue` in a call of other sizes.
    """

    mask: Mask
    _cache: list[tuple[Mask, object, "_Edited"]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "the edges of an edit are a mask."
        hint = "pass for example clearhead.prefix(1), or clearhead.dense(keep=booleans)."
        must_be_of(Mask, type(self).__name__, self.mask, rule, hint)

    def arguments(self) -> list[str]:
        text = repr(self.mask)
        if len(text) <= MOST_SHOWN:
            return [text]
        if isinstance(self.mask, Dense) and has_values(bits := self.mask.bits):
            return [f"dense(keep=<{int(bits.sum())} of {bits.numel()} cells>)"]
        return [f"{text[: MOST_SHOWN - 3]}..."]

    def removed(self) -> Mask:
        """Return the mask of the edges to remove."""
        return self.mask

    def for_copy(self, batch: range) -> Edit | None:
        return None if "B" in self.mask.sizes() else super().for_copy(batch)

    def edit_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        rule, grid = problem.mask, problem.grid
        at = grid, problem.device, site.at
        for known, position, edited in self._cache:
            if position == at and known.equals(rule, read=False):
                return replace(problem, mask=edited.mask), inputs
        where = self.where(problem, site)
        edges = edges_in_call(self.removed(), grid, site.at)
        mask = intersect(rule, ~edges)
        if names_lengths(~edges, grid) or not bool(where.all()):  # lengths would mean padding
            mask = WithoutEdges(rule, edges, where, repr(self))
        self._cache.append((rule, at, _Edited(mask, _counts_differ(problem, mask))))
        del self._cache[:-MASKS_KEPT]
        return replace(problem, mask=mask), inputs

    def removes_an_edge(self, before: Problem, after: Problem) -> bool:
        edited = (e for *_, e in self._cache if e.mask is after.mask)
        if before.mask is after.mask or not next(edited).removes:
            return False
        if not isinstance(before.bias, TensorBias) or not has_values(before.bias.tensor):
            return True
        # A model may mask keys by adding the lowest number of the dtype to their scores.
        numbers = before.bias.as_4d()
        visible = numbers > torch.finfo(numbers.dtype).min
        return bool((before.key_ranges.to_bool() & ~after.key_ranges.to_bool() & visible).any())


class _Edited(NamedTuple):
    """An edited mask, and whether it removes an edge that the original mask allows."""

    mask: Mask
    removes: bool


def _counts_differ(problem: Problem, edited: Mask) -> bool:
    """Return whether the edited mask, whose edges are a subset, allows fewer edges."""
    before = problem.key_ranges
    after = edited.key_ranges(problem.grid, before.lo.device)
    if not has_values(before.lo, after.lo):
        return True
    return bool((before.keys_per_query() != after.keys_per_query()).any())


class keep_only(knock_out):
    """Remove all edges except those that `mask` allows.

    The same as ``knock_out(~mask)``, with its rules for `align` and T x T masks. Raises its errors.

    Args:
        mask: the edges that remain.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.
    """

    def removed(self) -> Mask:
        return ~self.mask


@dataclass(frozen=True, eq=False, repr=False)
class temperature(Edit):
    """Divide the logits by `t`: w = softmax(x / t).

    Below 1 the weights become sharper, above 1 flatter. All logits are divided: x after scale, soft
    cap and bias, and the logit of a sink.

    Args:
        t: a positive number.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    Raises `BadValue` unless t > 0. In a call with sinks or ALiBi, which are the same for all
    queries, it raises it if `positions` or `batch` is set. In a call with a soft cap, it also does
    if `heads` is.
    """

    changes_queries = True

    t: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "t", finite_number("temperature", "t", self.t))
        if self.t <= 0:
            rule = "t divides the logits and is positive."
            hint = "pass t > 0; for equal weights use uniform()."
            raise BadValue(f"temperature got t={self.t:g}.", rule, hint)

    def arguments(self) -> list[str]:
        return [f"{self.t:g}"]

    def for_copy(self, batch: range) -> Edit | None:
        return None  # with a soft cap or sinks it applies to complete layers or heads only

    def edit_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        factor, softcap = 1 / self.t, problem.softcap
        if softcap is not None:
            if any(x is not None for x in (self.heads, self.positions, self.batch)):
                hint = "leave out heads, positions and batch."
                raise _cannot_differ(self, "a soft cap", "heads or positions", hint)
            problem = replace(problem, scale=problem.scale / self.t, softcap=softcap / self.t)
        else:
            q = inputs.q * self.factors(factor, problem, site).unsqueeze(-1)
            inputs = inputs._replace(q=q.to(inputs.q.dtype))
        sinks = problem.sinks
        if sinks is not None:
            _refuse_positions(self, "sinks")
            sinks = sinks * self.factors(factor, problem, site).flatten()
        return _with_bias(self, factor, replace(problem, sinks=sinks), site), inputs


@dataclass(frozen=True, eq=False, repr=False)
class uniform(Edit):
    """Make the weights equal: w = 1/n for each of the n keys that the query may look at.

    A sink gets weight 0.

    Args:
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of query heads; -1 is the last, None means all.
        positions: positions of queries in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    Raises `BadValue` if `positions` or `batch` is set in a call with sinks
    or ALiBi, because these are the same for all queries.
    """

    changes_queries = True

    def for_copy(self, batch: range) -> Edit | None:
        return None  # with sinks it applies to complete heads only

    def edit_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        where = self.where(problem, site)
        inputs = inputs._replace(q=inputs.q.masked_fill(where.unsqueeze(-1), 0.0))
        sinks = problem.sinks
        if sinks is not None:
            _refuse_positions(self, "sinks")
            sinks = sinks.masked_fill(where.flatten(), -math.inf)
        return _with_bias(self, 0.0, replace(problem, sinks=sinks), site), inputs


def _with_bias(edit: Edit, factor: float, problem: Problem, site: EditSite) -> Problem:
    """Return the problem with its bias times `factor` for the queries that the edit selects."""
    bias = problem.bias
    if bias is None:
        return problem
    factors = edit.factors(factor, problem, site)
    if isinstance(bias, Alibi):
        _refuse_positions(edit, "ALiBi")
        slopes = bias.of(problem.grid)
        return replace(problem, bias=Alibi(slopes * factors.flatten().to(slopes), bias.align))
    assert isinstance(bias, TensorBias)
    scaled = bias.as_4d() * factors.unsqueeze(-1)
    return replace(problem, bias=TensorBias(scaled.to(bias.tensor.dtype)))


def _refuse_positions(edit: Edit, what: str) -> None:
    if edit.positions is not None or edit.batch is not None:
        hint = "leave out positions and batch; heads are allowed."
        raise _cannot_differ(edit, what, "positions", hint)


def _cannot_differ(edit: Edit, what: str, parts: str, hint: str) -> BadValue:
    gave = f"{edit!r} was applied to a layer with {what}."
    return BadValue(gave, f"in one call, {what} cannot differ between {parts}.", hint)
