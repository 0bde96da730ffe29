"""The base class of edits: one change of attention, and where it applies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ....core.errors import BadValue, as_number, must_be_of
from ....core.masks.text_positions import BY_COLUMN, PerText, Positions
from ....core.problem.problem import Inputs, Problem
from ...follow.layers import checked_list, is_selected


class EditSite(NamedTuple):
    """The attention call that edits apply to: its layer, the number of earlier calls of that layer,
    and the positions of its columns."""

    layer: int
    module: str
    call: int
    at: Positions = BY_COLUMN


Edited: TypeAlias = tuple[Problem, Inputs]  # what is computed instead of a call
E = TypeVar("E", bound="Edit")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Edit:
    """One change, and where it applies. For each argument, None means all.

    Args:
        layers: numbers as in `Call.layer`, or patterns for module names such as ``"*.5.*"``.
        heads: indices of query heads; -1 is the last. For `patch` of keys or values, indices of KV
            heads.
        positions: positions of queries in the text, counted from 0, including tokens in a cache; -1
            is the last token of the text in a call. Padding does not count if the call carries it
            (see `clearhead.edits`). For `patch` of keys or values, positions of keys.
        batch: a range of rows of the batch; -1 is the last. Rows beyond the batch are ignored.

    Raises `BadType` for an empty list, for items of another kind, and if `batch` is not a range.
    `intervene` raises `BadValue` for layers or heads that the model does not have.
    """

    # Edits of a call apply in the order of their stages: 0 changes the problem, 1 the weights, 2
    # the output.
    stage: ClassVar[int] = 0
    changes_queries: ClassVar[bool] = False  # Does `edit_problem` change the queries?
    needs_runs: ClassVar[bool] = False  # Does it depend on more runs of the model?

    layers: Sequence[int | str] | None = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None
    batch: range | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "positions"):
            value = checked_list(name, getattr(self, name), patterns=name == "layers")
            object.__setattr__(self, name, value)
        if self.batch is not None:
            rule, hint = "it is a range of rows of the batch.", "pass for example range(0, 2)."
            must_be_of(range, f"{type(self).__name__} with batch=", self.batch, rule, hint)

    def __repr__(self) -> str:
        where = [f"{name}={x!r}" for name, x in self._where() if x is not None]
        return f"{type(self).__name__}({', '.join([*self.arguments(), *where])})"

    def _where(self) -> Iterable[tuple[str, object]]:
        for name in ("layers", "heads", "positions"):
            x = getattr(self, name)
            yield name, x if x is None else list(x)
        yield "batch", self.batch

    def arguments(self) -> list[str]:
        """Return the edit's own arguments as written in a call."""
        return []

    def edit_inputs(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        """Return the problem with other queries, keys or values, before any `edit_problem`."""
        return problem, inputs

    def edit_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        """Return the problem and inputs to compute instead."""
        return problem, inputs

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, site: EditSite) -> Tensor:
        """Return the output that replaces `out`, (B, H, Tq, Dv)."""
        return out

    def removes_an_edge(self, before: Problem, after: Problem) -> bool | None:
        """Return whether the edited problem lacks a visible edge of the problem before.

        None for edits that do not remove edges.
        """
        return None

    def visible_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        """Return the problem whose weights are those of the edited call, for `watch`."""
        return problem, inputs

    def reads(self, site: EditSite) -> tuple[int, ...]:
        """Identify the recorded data that the edit reads for this call.

        If two calls of the same problem have equal identifiers, the edit changes them alike.
        """
        return ()

    def applies(self, problem: Problem, site: EditSite) -> bool:
        """Return whether the edit selects a query of this call."""
        return bool(self.where(problem, site).any())

    def for_copy(self, batch: range) -> "Edit | None":
        """Return the edit limited to these rows, which are one copy of the batch among several.

        None if the edit cannot be limited to a part of a batch.
        """
        return replace(self, batch=batch) if self.batch is None else None

    @property
    def of_keys(self) -> bool:
        """Do `heads` and `positions` select KV heads and positions of keys, not of queries?"""
        return False

    def head_count(self, problem: Problem) -> int:
        """Return the number of heads from which `heads` selects."""
        return problem.G if self.of_keys else problem.H

    def heads_of(self, problem: Problem) -> list[int]:
        """Return the indices of the selected heads. Raises `BadValue` for a head that does not
        exist."""
        count = self.head_count(problem)
        for h in self.heads or ():
            if not -count <= h < count:
                raise self.no_head(h, problem)
        return list(range(count)) if self.heads is None else [h % count for h in self.heads]

    def no_head(self, h: int, problem: Problem) -> BadValue:
        """Return the error for a head that does not exist."""
        H, G = problem.H, problem.G
        kind, count, rule = "heads", H, f"the layer has {H} query heads, numbered from 0"
        if self.of_keys and G < H:
            kind, count = "key heads", G
            rule = f"the layer has {G} key heads, numbered from 0, each for {H // G} query heads"
            rule += f"; query head {h} reads key head {h // (H // G)}" if 0 <= h < H else ""
        hint = f"use {kind} from 0 to {count - 1}."
        return BadValue(f"{self!r} names head {h}.", f"{rule}.", hint)

    def batch_of(self, problem: Problem) -> list[int]:
        """Return the selected rows of the batch, in the order of the range, without rows beyond
        the batch."""
        B = problem.B
        if self.batch is None:
            return list(range(B))
        existing = sorted((b for b in range(-B, B) if b in self.batch), key=self.batch.index)
        return list(dict.fromkeys(b % B for b in existing))

    def where(self, problem: Problem, site: EditSite) -> Tensor:
        """Return booleans for the selected queries, (B|1, H|1, Tq|1).

        An edit `of_keys` returns those of keys, (B|1, G|1, Tk|1).
        """
        selected = torch.ones((1, 1, 1), dtype=torch.bool)
        if self.heads is not None:
            flags = flags_at(self.heads_of(problem), self.head_count(problem))
            selected = selected & flags.reshape(1, -1, 1)
        if self.batch is not None:
            selected = selected & flags_at(self.batch_of(problem), problem.B).reshape(-1, 1, 1)
        if self.positions is not None:
            selected = selected & self.at_positions(problem, site)
        return selected.to(problem.device)

    def at_positions(self, problem: Problem, site: EditSite) -> Tensor:
        """Return which queries of the call, or keys, are at the named positions, (B|1, 1, T).
        Raises `BadValue` if the position of its query is unknown."""
        named = torch.tensor(self.positions or (), dtype=torch.long)
        from_start = named[named >= 0]
        if site.at.start is None and not self.of_keys and len(from_start):
            raise self._unknown_position(problem)
        from_first, from_last, real = self._columns(problem, site)
        return real & (torch.isin(from_first, from_start) | torch.isin(from_last, named))

    def positions_in(self, problem: Problem, site: EditSite) -> set[int]:
        """Return the positions in the texts of a call from which `positions` selects. Raises
        `BadValue` if they are unknown."""
        if site.at.start is None and not self.of_keys:
            raise self._unknown_position(problem)
        from_first, _, real = torch.broadcast_tensors(*self._columns(problem, site))
        return set(from_first[real].tolist())

    def _columns(self, problem: Problem, site: EditSite) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of the columns of queries, or keys, in their texts, counted from 0
        and from -1 back, and which columns are real tokens, (B|1, 1, T) each."""
        at, size = site.at, problem.Tk if self.of_keys else problem.Tq
        start = at.first_key if self.of_keys else at.start or 0
        first, after = at.real_keys(size) if self.of_keys else at.real_queries(size)
        column = torch.arange(size)
        real = (column >= _per_text(first)) & (column < _per_text(after))
        return column + _per_text(start), column - _per_text(after), real

    def _unknown_position(self, problem: Problem) -> BadValue:
        gave = f"{self!r} was applied to one query and {problem.Tk} keys."
        rule = "without a causal mask, the position of a single query in the text is unknown."
        return BadValue(gave, rule, "count from the end, positions=[-1], or leave positions out.")

    def factors(self, factor: float, problem: Problem, site: EditSite) -> Tensor:
        """Return `factor` for the selected queries and 1 for the others, (B|1, H|1, Tq|1) in the
        wide dtype."""
        one = torch.ones((), dtype=problem.wide, device=problem.device)
        return torch.where(self.where(problem, site), factor, one)


def edited_call(edits: Sequence[Edit], problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
    """Return the problem and inputs of a call with all these edits, which apply to it."""
    for edit in edits:
        problem, inputs = edit.edit_inputs(problem, inputs, site)
    for edit in edits:
        problem, inputs = edit.edit_problem(problem, inputs, site)
    return problem, inputs


def in_order(edits: Sequence[Edit], problem: Problem, site: EditSite) -> list[int]:
    """Return the indices of the edits that apply to this call, in the order of application."""
    numbers = [
        number
        for number, edit in enumerate(edits)
        if is_selected(edit.layers, site.layer, site.module) and edit.applies(problem, site)
    ]
    return sorted(numbers, key=lambda number: edits[number].stage)


def replaced(
    edit: Edit, out: Tensor, value: Tensor, problem: Problem, site: EditSite,
    queries: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `out` with `value` in the heads, positions and texts that the edit selects.

    `out` is the output of the call, or its queries, keys or values. `value` broadcasts to
    (B, n, queries, Dv), for the B texts and n heads of the edit. Its rows belong to `queries`,
    (B|1, queries); -1 means no query, None means all queries. Raises `BadValue` for a value of
    another shape.
    """
    heads, batch = edit.heads_of(problem), edit.batch_of(problem)
    queries = torch.arange(out.shape[2]).unsqueeze(0) if queries is None else queries
    queries = queries.expand(len(batch), -1)
    wanted = (len(batch), len(heads), queries.shape[1], out.shape[-1])
    try:
        value = value.to(out.device, out.dtype).expand(wanted)
    except RuntimeError:
        gave = f"{edit!r} has a tensor of shape {tuple(value.shape)}; the layer has {wanted}."
        rule = "a replacement broadcasts to (B, heads, Tq, Dv), in the order of batch= and heads=."
        raise BadValue(gave, rule, "use the size or 1 in each dimension.") from None
    text, number = (queries >= 0).nonzero(as_tuple=True)
    target = torch.tensor(batch)[text, None], torch.tensor(heads), queries[text, number, None]
    text, number = text.to(out.device), number.to(out.device)
    full = out.index_put(tuple(x.to(out.device) for x in target), value[text, :, number])
    if edit.positions is None:
        return full
    return torch.where(edit.where(problem, site).unsqueeze(-1), full, out)


def _per_text(number: PerText) -> Tensor:
    """Convert one number per text to a tensor, (B|1, 1, 1)."""
    return torch.tensor(number, dtype=torch.long).reshape(-1, 1, 1)


def flags_at(indices: Sequence[int], size: int) -> Tensor:
    flags = torch.zeros(size, dtype=torch.bool)
    flags[list(indices)] = True
    return flags


def finite_number(edit: str, name: str, value: object) -> float:
    hint = f"pass for example {edit}(0.5)."
    return as_number(f"{edit} got {name}", value, f"{name} is a finite number.", hint)
