"""What an edit is: one change of attention, and where it applies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import BadType, BadValue, as_number
from ...masks.text_positions import BY_COLUMN, PerText, Positions
from ...problem.problem import Inputs, Problem
from ..layers import checked_list, is_selected


class Here(NamedTuple):
    """Which call an edit is applied to: the layer, how many calls it made before, and where it
    stands in its texts."""

    layer: int
    module: str
    call: int
    at: Positions = BY_COLUMN


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Edit:
    """One change, and where it applies. None means to all of them.

    Args:
        layers: numbers as in `Call.layer`, or patterns for module names such as ``"*.5.*"``.
        heads: the numbers of query heads; -1 is the last.
        rows: the positions of queries in the text, from 0 on, whether or not a cache holds what
            came before; -1 is the last token of the text in a call. Padding is not counted, where
            the call carries it (see `clearhead.edits`).
        batch: a range of rows of the batch; -1 is the last, and rows beyond the batch are left out.
    """

    # Edits of a call apply by stage: 0 changes the problem, 1 the weights that come of it, 2 the
    # output.
    stage: ClassVar[int] = 0

    layers: Sequence[int | str] | None = None
    heads: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    batch: range | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", checked_list("layers", self.layers, patterns=True))
        for name in ("heads", "rows"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checked_list(name, getattr(self, name)))
        if self.batch is not None and not isinstance(self.batch, range):
            raise BadType(
                f"{type(self).__name__} got batch={self.batch!r}.",
                "batch is a range of rows of the batch.",
                "pass for example batch=range(0, 2).",
            )

    def __repr__(self) -> str:
        given = [f"{name}={x!r}" for name, x in self._where() if x is not None]
        return f"{type(self).__name__}({', '.join([*self.arguments(), *given])})"

    def _where(self) -> Iterable[tuple[str, object]]:
        for name in ("layers", "heads", "rows"):
            x = getattr(self, name)
            yield name, x if x is None else list(x)
        yield "batch", self.batch

    def arguments(self) -> list[str]:
        """Its own arguments, as written in a call."""
        return []

    def edit_problem(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        """The problem to compute instead."""
        return problem, inputs

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        """The output to return instead, (B, H, Tq, Dv)."""
        return out

    def removes_an_edge(self, before: Problem, after: Problem) -> bool | None:
        """Does the edited problem lack an edge that was visible? None for an edit that removes
        none by design."""
        return None

    def visible_problem(
        self, problem: Problem, inputs: Inputs, here: Here
    ) -> tuple[Problem, Inputs]:
        """The edited problem whose weights are those of the edited call."""
        return problem, inputs

    def reads(self, here: Here) -> tuple[int, ...]:
        """What it reads of another run for this call: where that is the same, it does the same to
        calls of the same problem."""
        return ()

    def applies(self, problem: Problem, here: Here) -> bool:
        """Does it change anything in this call?"""
        where = self.where(problem, here)
        return where is None or bool(where.any())

    def for_copy(self, batch: range) -> "Edit | None":
        """The same for these rows of a batch that holds several copies of it; None if it does not
        apply to parts of a batch."""
        return replace(self, batch=batch) if self.batch is None else None

    def heads_of(self, problem: Problem) -> list[int]:
        """The heads that it changes. Raises `BadValue` for one that is not there."""
        H = problem.H
        for h in self.heads or ():
            if not -H <= h < H:
                raise BadValue(
                    f"{self!r} names head {h}.",
                    f"the layer has {H} query heads, numbered from 0.",
                    f"name heads from 0 to {H - 1}.",
                )
        return list(range(H)) if self.heads is None else [h % H for h in self.heads]

    def batch_of(self, problem: Problem) -> list[int]:
        """The rows of the batch that it changes, in the order of its range; -1 is the last, and
        rows that are not there are left out."""
        B = problem.B
        if self.batch is None:
            return list(range(B))
        there = sorted((b for b in range(-B, B) if b in self.batch), key=self.batch.index)
        return list(dict.fromkeys(b % B for b in there))

    def where(self, problem: Problem, here: Here) -> Tensor | None:
        """The queries that it changes, (B|1, H|1, Tq|1) booleans; None means all of the call."""
        parts = []
        if self.heads is not None:
            parts.append(at_places(self.heads_of(problem), problem.H).reshape(1, -1, 1))
        if self.batch is not None:
            parts.append(at_places(self.batch_of(problem), problem.B).reshape(-1, 1, 1))
        if (rows := self._rows_of(problem, here)) is not None:
            parts.append(rows)
        if not parts:
            return None
        found = parts[0].to(problem.device)
        for part in parts[1:]:
            found = found & part.to(problem.device)
        return found

    def _rows_of(self, problem: Problem, here: Here) -> Tensor | None:
        if self.rows is None:
            return None
        Tq, start = problem.Tq, here.at.start
        query = torch.arange(Tq).reshape(1, 1, -1)
        after = _column(here.at.real_queries(Tq)[1])
        last = torch.tensor([r for r in self.rows if r < 0], dtype=torch.long)
        found = torch.isin(query - after, last)
        if named := [r for r in self.rows if r >= 0]:
            if start is None:
                raise BadValue(
                    f"{self!r} was applied to one query and {problem.Tk} keys.",
                    "rows are positions in the text, and a call without a causal mask does not say "
                    "where in it its only query stands.",
                    "name rows from the end, rows=[-1], or leave rows out.",
                )
            found = found | torch.isin(query + _column(start), torch.tensor(named))
        return found & here.at.is_real(Tq)

    def factors(self, factor: float, problem: Problem, here: Here) -> Tensor:
        """`factor` for the queries that it is about, else 1: (B|1, H|1, Tq|1) in the wide dtype."""
        where = self.where(problem, here)
        one = torch.ones((1, 1, 1), dtype=problem.wide, device=problem.device)
        return one * factor if where is None else torch.where(where, factor, one)


def in_order(edits: Sequence[Edit], problem: Problem, here: Here) -> list[int]:
    """The numbers of the edits that apply to this call, in the order in which they do."""
    numbers = [
        number
        for number, edit in enumerate(edits)
        if is_selected(edit.layers, here.layer, here.module) and edit.applies(problem, here)
    ]
    return sorted(numbers, key=lambda number: edits[number].stage)


def replaced(
    edit: Edit,
    out: Tensor,
    value: Tensor,
    problem: Problem,
    here: Here,
    queries: Tensor | None = None,
) -> Tensor:
    """The output with `value`, which broadcasts to (B, n, queries, Dv), in place of what the edit
    is about: n heads, the rows of its batch, and of the `queries` (B|1, queries) those that it
    names; -1 is no query, None means all. Raises `BadValue` where it does not fit."""
    heads, batch = edit.heads_of(problem), edit.batch_of(problem)
    queries = torch.arange(problem.Tq).unsqueeze(0) if queries is None else queries
    queries = queries.expand(len(batch), -1)
    wanted = (len(batch), len(heads), queries.shape[1], out.shape[-1])
    try:
        value = value.to(out.device, out.dtype).expand(wanted)
    except RuntimeError:
        raise BadValue(
            f"{edit!r} has a tensor of shape {tuple(value.shape)}; the layer has {wanted}.",
            "what replaces an output broadcasts to (B, heads, Tq, Dv).",
            "give each dimension its size or 1, texts and heads in the order in which they are "
            "named.",
        ) from None
    text, number = (queries >= 0).nonzero(as_tuple=True)
    places = torch.tensor(batch)[text, None], torch.tensor(heads), queries[text, number, None]
    text, number = text.to(out.device), number.to(out.device)
    full = out.index_put(tuple(x.to(out.device) for x in places), value[text, :, number])
    if edit.rows is None:
        return full
    where = edit.where(problem, here)
    assert where is not None
    return torch.where(where.unsqueeze(-1), full, out)


def _column(number: PerText) -> Tensor:
    """A number for each text, (B|1, 1, 1)."""
    return torch.tensor(number, dtype=torch.long).reshape(-1, 1, 1)


def at_places(places: Sequence[int], size: int) -> Tensor:
    found = torch.zeros(size, dtype=torch.bool)
    found[list(places)] = True
    return found


def finite_number(edit: str, name: str, given: object) -> float:
    hint = f"pass for example {edit}(0.5)."
    return as_number(f"{edit} got {name}", given, f"{name} is a finite number.", hint)
