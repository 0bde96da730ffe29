"""What can be changed about attention while a model runs: `clearhead.edits`.

With the logits x of the keys that a query may look at (after scale, soft cap and bias), the weights
w = softmax(x) and the output o = w V of each head and query:

| edit                    | what becomes of it                                              |
|-------------------------|-----------------------------------------------------------------|
| `knock_out(mask)`       | the edges that `mask` allows are not there: w = 0, renormalised  |
| `keep_only(mask)`       | all the others are not there                                    |
| `temperature(t)`        | w = softmax(x / t)                                              |
| `uniform()`             | w = 1/n for each of the n keys that the query may look at       |
| `freeze(recording)`     | w as recorded in another run                                    |
| `ablate(by=...)`        | o = 0, the mean of a reference set, or a tensor                 |
| `scale(factor)`         | factor * o                                                      |
| `patch(recording)`      | o as recorded in another run                                    |

The first four are questions of their own, which an engine answers like any other, in O(S) memory.
Edits apply in the order of the list; those of the weights before those of the output.

All edits say where they apply:

    layers  numbers as in `Call.layer`, or patterns for module names such as ``"*.5.*"``
    heads   the numbers of query heads; -1 is the last
    rows    the positions of queries in the text, from 0 on, whether or not a cache holds what came
            before, and padding counted; -1 is the last query of a call
    batch   a range of rows of the batch

and None means all of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of, whole_number
from ..masks import Grid, Mask, intersect
from ..masks.mask import corner_of
from ..masks.values import positions
from ..masks.without import Without, placed
from ..problem.biases import Alibi, TensorBias
from ..problem.problem import Inputs, Problem

MASKS_KEPT = 4  # edited masks that an edit keeps: layers take turns with a few


class Here(NamedTuple):
    """Which call an edit is applied to: the layer, how often it was asked before, and where its
    query 0 stands in the text (None if the call does not say)."""

    layer: int
    module: str
    turn: int
    start: int | Tensor | None


def start_of(problem: Problem) -> int | Tensor | None:
    """Where query 0 stands among the keys. Where no rule says so, several queries begin with the
    first; one alone may be a step of generation."""
    corner = corner_of(problem.mask, problem.grid)
    if corner is None and (problem.Tq == problem.Tk or problem.Tq > 1):
        return 0
    return corner


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Edit:
    """One change, and where it applies."""

    layers: Sequence[int | str] | None = None
    heads: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    batch: range | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            object.__setattr__(self, "layers", _listed("layers", self.layers, (int, str)))
        for name in ("heads", "rows"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _listed(name, getattr(self, name), (int,)))
        if self.batch is not None and not isinstance(self.batch, range):
            raise BadType(
                f"{type(self).__name__} got batch={self.batch!r}.",
                "batch is a range of rows of the batch.",
                "pass for example batch=range(0, 2).",
            )

    def __repr__(self) -> str:
        given = [f"{name}={x!r}" for name, x in self._where() if x is not None]
        return f"{type(self).__name__}({', '.join([*self.said(), *given])})"

    def _where(self) -> Iterable[tuple[str, object]]:
        for name in ("layers", "heads", "rows"):
            x = getattr(self, name)
            yield name, x if x is None else list(x)
        yield "batch", self.batch

    def said(self) -> list[str]:
        """What it was given beside the place."""
        return []

    def question(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        """The question that is asked instead."""
        return problem, inputs

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        """The output, (B, H, Tq, Dv), that is given instead."""
        return out

    def applies(self, problem: Problem, here: Here) -> bool:
        """Is there anything of this call that it is about?"""
        self.heads_of(problem)
        if self.batch is not None and not len(range(problem.B)[self.batch.start : self.batch.stop]):
            return False
        found = self._rows_of(problem, here)
        return found is None or bool(found.any())

    def heads_of(self, problem: Problem) -> list[int]:
        """The heads that it is about. Raises `BadValue` for one that is not there."""
        H = problem.H
        for h in self.heads or ():
            if not -H <= h < H:
                raise BadValue(
                    f"{self!r} names head {h}.",
                    f"the layer has {H} query heads, numbered from 0.",
                    f"name heads from 0 to {H - 1}.",
                )
        return list(range(H)) if self.heads is None else [h % H for h in self.heads]

    def where(self, problem: Problem, here: Here) -> Tensor | None:
        """The queries that it is about, (B|1, H|1, Tq|1) booleans; None means all of the call."""
        parts = []
        if self.heads is not None:
            parts.append(_at(self.heads_of(problem), problem.H).reshape(1, -1, 1))
        if self.batch is not None:
            parts.append(_at(list(self.batch), problem.B).reshape(-1, 1, 1))
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
        Tq = problem.Tq
        at = torch.arange(Tq).reshape(1, 1, -1)
        last = torch.tensor([r + Tq for r in self.rows if r < 0], dtype=torch.long)
        found = torch.isin(at, last)
        if named := [r for r in self.rows if r >= 0]:
            if here.start is None:
                raise BadValue(
                    f"{self!r} was asked about a query and {problem.Tk} keys.",
                    "rows are positions in the text, and a call without a causal mask does not say "
                    "where in it its only query stands.",
                    "name rows from the end, rows=[-1], or leave rows out.",
                )
            at = positions(here.start, problem.grid, torch.device("cpu"))
            found = found | torch.isin(at, torch.tensor(named))
        return found

    def factors(self, factor: float, problem: Problem, here: Here) -> Tensor:
        """`factor` for the queries that it is about, else 1: (B|1, H|1, Tq|1) in the wide dtype."""
        where = self.where(problem, here)
        one = torch.ones((1, 1, 1), dtype=problem.wide, device=problem.device)
        return one * factor if where is None else torch.where(where, factor, one)


# ------------------------------------------------------------------------- edits of the question


@dataclass(frozen=True, eq=False, repr=False)
class knock_out(Edit):
    """The edges that `mask` allows are not there: their weights are 0 and the others of the query
    renormalise. A query that has no edge left gives 0.

    >>> import clearhead as ch
    >>> ch.edits.knock_out(ch.prefix(1), layers=[5])  # no head of layer 5 looks at the first token
    knock_out(prefix(1), layers=[5])

    Rules over positions that leave `align` open stand where the call's own mask lets the queries
    stand, so they follow a cache. A mask of T x T (`documents`, `dense`) is about a text of T
    tokens from its first on: it follows a cache too, and edges to what comes after stay.
    """

    mask: Mask
    _made: list[tuple[Mask, Grid, torch.device, Mask]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mask, Mask):
            raise BadType(
                f"{type(self).__name__} got {kind_of(self.mask)}.",
                "which edges an edit is about is a mask.",
                "pass for example clearhead.prefix(1), or clearhead.dense(keep=booleans).",
            )

    def said(self) -> list[str]:
        return [repr(self.mask)]

    def removed(self) -> Mask:
        """The edges that go."""
        return self.mask

    def question(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        rule, grid, device = problem.mask, problem.grid, problem.device
        for known, sizes, place, made in self._made:
            if sizes == grid and place == device and known._is(rule):
                return replace(problem, mask=made), inputs
        where = self.where(problem, here)
        edges = placed(self.removed(), grid, here.start)
        made = intersect(rule, ~edges) if where is None else Without(rule, edges, where, repr(self))
        self._made.append((rule, grid, device, made))
        del self._made[:-MASKS_KEPT]
        return replace(problem, mask=made), inputs


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
    soft cap where it names heads or rows: no one question says so.
    """

    t: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "t", _number("temperature", "t", self.t))
        if self.t <= 0:
            raise BadValue(
                f"temperature got t={self.t:g}.",
                "logits are divided by t, which is positive.",
                "pass t > 0; uniform() gives equal weights.",
            )

    def said(self) -> list[str]:
        return [f"{self.t:g}"]

    def question(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        factor, softcap = 1 / self.t, problem.softcap
        by_row = self.rows is not None or self.batch is not None
        if softcap is not None:
            if by_row or self.heads is not None:
                raise _not_one_question(self, "a soft cap", "name no heads, rows or batch.")
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

    Raises `BadValue` in a call with sinks or ALiBi where it names rows: no one question says so.
    """

    def question(self, problem: Problem, inputs: Inputs, here: Here) -> tuple[Problem, Inputs]:
        where = self.factors(0.0, problem, here) == 0
        inputs = inputs._replace(q=inputs.q.masked_fill(where.unsqueeze(-1), 0.0))
        sinks = problem.sinks
        if sinks is not None:
            _must_be_whole(self, self.rows is not None or self.batch is not None, "sinks")
            sinks = sinks.masked_fill(where.flatten(), -math.inf)
        return _with_bias(self, 0.0, replace(problem, sinks=sinks), here), inputs


def _with_bias(edit: Edit, factor: float, problem: Problem, here: Here) -> Problem:
    """The question with its bias times the factor, for the queries that the edit is about."""
    bias = problem.bias
    if bias is None:
        return problem
    factors = edit.factors(factor, problem, here)
    if isinstance(bias, Alibi):
        _must_be_whole(edit, edit.rows is not None or edit.batch is not None, "ALiBi")
        slopes = bias.of(problem.grid)
        return replace(problem, bias=Alibi(slopes * factors.flatten().to(slopes), bias.align))
    assert isinstance(bias, TensorBias)
    scaled = bias.four() * factors.unsqueeze(-1)
    return replace(problem, bias=TensorBias(scaled.to(bias.tensor.dtype)))


# ----------------------------------------------------------------------------- edits of the output


@dataclass(frozen=True, eq=False, repr=False)
class ablate(Edit):
    """The output of the heads is replaced: by zeros, or by a tensor that broadcasts to
    (B, n, Tq, Dv), where n are the heads named, in their order (all H where none are).

    Source: Michel, Levy & Neubig 2019, "Are Sixteen Heads Really Better than One?".
    """

    by: str | Tensor = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.by, Tensor) and self.by != "zero":
            raise BadValue(
                f"ablate got by={self.by!r}.",
                'an output is replaced by "zero" or a tensor.',
                'pass by="zero", or a tensor that broadcasts to (B, heads, Tq, Dv).',
            )

    def said(self) -> list[str]:
        if isinstance(self.by, Tensor):
            return [f"by=<{'x'.join(map(str, self.by.shape))} numbers>"]
        return [f"by={self.by!r}"] if self.by != "zero" else []

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        if isinstance(self.by, Tensor):
            return replaced(self, out, self.by, problem, here)
        where = self.where(problem, here)
        return torch.zeros_like(out) if where is None else out.masked_fill(where.unsqueeze(-1), 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class scale(Edit):
    """The output of the heads is multiplied by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", _number("scale", "factor", self.factor))

    def said(self) -> list[str]:
        return [f"{self.factor:g}"]

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, here: Here) -> Tensor:
        scaled = out * self.factors(self.factor, problem, here).unsqueeze(-1)
        return scaled.to(out.dtype)


def replaced(edit: Edit, out: Tensor, value: Tensor, problem: Problem, here: Here) -> Tensor:
    """The output with `value`, which broadcasts to (B, n, Tq, Dv), in place of what the edit is
    about: n heads, and the rows of its batch. Raises `BadValue` where it does not fit."""
    heads = edit.heads_of(problem)
    batch = range(problem.B) if edit.batch is None else edit.batch
    wanted = (len(batch), len(heads), *out.shape[2:])
    try:
        value = value.to(out.device, out.dtype).expand(wanted)
    except RuntimeError:
        raise BadValue(
            f"{edit!r} has a tensor of shape {tuple(value.shape)}; the layer has {wanted}.",
            "what replaces an output broadcasts to (B, heads, Tq, Dv).",
            "give each dimension its size or 1, heads in the order in which they are named.",
        ) from None
    full = out.index_put(
        (torch.tensor(list(batch)).unsqueeze(1), torch.tensor(heads)), value, accumulate=False
    )
    if edit.rows is None:
        return full
    where = edit.where(problem, here)
    assert where is not None
    return torch.where(where.unsqueeze(-1), full, out)


# -------------------------------------------------------------------------------- what edits check


def _at(places: Sequence[int], size: int) -> Tensor:
    found = torch.zeros(size, dtype=torch.bool)
    found[list(places)] = True
    return found


def _must_be_whole(edit: Edit, by_row: bool, what: str) -> None:
    if by_row:
        raise _not_one_question(edit, what, "name no rows and no batch: heads can be named.")


def _not_one_question(edit: Edit, what: str, way_out: str) -> BadValue:
    return BadValue(
        f"{edit!r} was applied to a layer with {what}.",
        f"the edited question has {what} that is the same for all it is about.",
        way_out,
    )


def _listed(name: str, given: object, kinds: tuple[type, ...]) -> tuple[int | str, ...]:
    found: list[int | str | None] = [None]
    if isinstance(given, Iterable) and not isinstance(given, str):
        found = [x if isinstance(x, str) and str in kinds else whole_number(x) for x in given]
    if None in found or not found:
        what = "numbers or patterns for module names" if str in kinds else "whole numbers"
        raise BadType(
            f"{name} is {given!r}.",
            f"{name} is a list of {what}, not empty; None means all.",
            f"pass for example {name}=[0, 3].",
        )
    return tuple(x for x in found if x is not None)


def _number(edit: str, name: str, given: object) -> float:
    try:
        number = float(given)  # type: ignore[arg-type]  # it says what is none
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number) or isinstance(given, (str, bool)):
        raise BadType(
            f"{edit} got {name}={given!r}.",
            f"{name} is a finite number.",
            f"pass for example {edit}(0.5).",
        )
    return number
