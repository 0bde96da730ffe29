"""Runs of a model with edits: as copies of the batch in one run, where they can be told apart."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors.limits import TOKENS_AT_ONCE
from ..functional.ambient import EditedCall, editing
from ..nn.token_ids import run
from ..problem.problem import Inputs, Problem
from .copies import Layout, fresh, leaves, repeated
from .edits import Edit
from .intervene import intervene


class UneditedRun(NamedTuple):
    """What copies are compared with: the metric, the layout of the output, and the attention calls
    of one copy of the batch, unedited."""

    baseline: float
    layout: Layout
    problems: Sequence[Problem]

    @property
    def batch_sizes(self) -> set[int]:
        return {problem.B for problem in self.problems}

    @property
    def tokens(self) -> int:
        """The most positions in one call, of all rows."""
        return max(problem.B * max(problem.Tq, problem.Tk) for problem in self.problems)

    @property
    def eps(self) -> float:
        """The rounding of the coarsest dtype."""
        return max(torch.finfo(problem.dtype).eps for problem in self.problems)


class EditedRuns:
    """Runs the model with each of many groups of edits, and measures its output.

    Groups run together, as copies of the batch of which each has its own edits, if the output can
    be cut into copies. The first such run holds an unedited copy, too: if that is measured
    otherwise than alone, the rows of a batch depend on each other. Where copies cannot be told
    apart, each group runs alone, and a warning gives the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        unedited: UneditedRun,
        number: Callable[[Any], float],
        at_once: int | None,
    ) -> None:
        self.model, self.inputs, self.unedited, self.number = model, inputs, unedited, number
        self.at_once = at_once or max(1, TOKENS_AT_ONCE // unedited.tokens)
        self._checked = False

    def measure(self, groups: Mapping[str, Sequence[Edit]]) -> Iterator[tuple[str, float]]:
        """The name of each group of edits and what it makes of the metric, in their order."""
        rest = dict(groups)
        together = self.at_once > 1 and len(rest) > 1
        if together and (why := self._why_alone()):
            self._warn(why)
            together = False
        while rest:
            names, apart = self._next(rest) if together else ([next(iter(rest))], True)
            try:
                if apart:
                    values = [self._alone(rest[name]) for name in names]
                else:
                    values = self._together([rest[name] for name in names])
            except _Inseparable as error:
                self._warn(str(error))
                together = False
                continue
            for name, value in zip(names, values, strict=True):
                yield name, value
                del rest[name]

    def _why_alone(self) -> str:
        """Why no copies can run together; "" if they may."""
        sizes = self.unedited.batch_sizes
        if self.unedited.layout.uncut:
            return self.unedited.layout.uncut
        if any(problem.dropout for problem in self.unedited.problems):
            return "dropout by a seed drops other weights in other rows"
        if len(sizes) > 1:
            return f"its attention calls have batches of {', '.join(map(str, sorted(sizes)))}"
        rows = {len(x.value) for x in leaves(self.inputs) if _has_rows(x.value)}
        return "" if sizes <= rows else f"no input has the {max(sizes)} rows of its attention calls"

    def _next(self, rest: Mapping[str, Sequence[Edit]]) -> tuple[list[str], bool]:
        """The names of those that run next, as many as may run together; or one, and True, if it
        runs alone."""
        (B,), names = self.unedited.batch_sizes, list[str]()
        for name, group in rest.items():
            if any(edit.for_copy(range(B)) is None for edit in group):
                return (names, False) if names else ([name], True)
            names.append(name)
            if len(names) + (not self._checked) == self.at_once:
                break
        return names, len(names) == 1 and (self._checked or self.at_once > 2)

    def _alone(self, edits: Sequence[Edit]) -> float:
        with intervene(self.model, edits):
            return self.number(run(self.model, fresh(self.inputs)))

    def _together(self, groups: Sequence[Sequence[Edit]]) -> list[float]:
        """What each group makes of the metric, of one run. Raises `_Inseparable`."""
        # In the middle: of rows in another order, the first or the last may seem to be right.
        control = None if self._checked else (len(groups) + 1) // 2
        (B,), copies = self.unedited.batch_sizes, list(groups)
        if control is not None:
            copies.insert(control, ())
        count = len(copies)
        edits = [
            copy
            for i, group in enumerate(copies)
            for edit in group
            if (copy := edit.for_copy(range(i * B, (i + 1) * B))) is not None
        ]
        seen = BatchSizes()
        try:
            with editing(seen), intervene(self.model, edits):
                output = run(self.model, repeated(self.inputs, B, count))
        except Exception as error:  # what the model raises of so many rows, or for want of memory
            first, *_ = str(error).splitlines() or [""]
            raise _Inseparable(f"{count} copies raised {type(error).__name__}: {first}") from error
        if seen.sizes != {count * B}:
            sizes = ", ".join(map(str, sorted(seen.sizes)))
            raise _Inseparable(f"attention calls of {count * B} rows have batches of {sizes}")
        cuts = self.unedited.layout.cut(output, count)
        if isinstance(cuts, str):
            raise _Inseparable(cuts)
        values = [self.number(cut) for cut in cuts]
        if control is not None:
            self._check(values.pop(control), values)
        return values

    def _check(self, control: float, edited: Sequence[float]) -> None:
        """Raises `_Inseparable` if the unedited copy is not measured as it is alone, but for
        rounding."""
        baseline, eps = self.unedited.baseline, self.unedited.eps
        largest = max((abs(x - baseline) for x in edited if math.isfinite(x)), default=0.0)
        rounding = max(0.01 * largest, math.sqrt(eps) * abs(baseline), 10 * eps)
        alike = control == baseline or (math.isnan(control) and math.isnan(baseline))
        if not (alike or abs(control - baseline) <= rounding):
            raise _Inseparable(
                f"beside edited copies the unedited one gives {control:.6g}, alone {baseline:.6g}"
            )
        self._checked = True

    def _warn(self, why: str) -> None:
        warnings.warn(
            "effects runs one copy of the batch at a time, which takes longer, because copies in "
            f"one batch cannot be told apart: {why}. A metric of logits, without labels in the "
            "inputs, lets copies run together; at_once=1 turns this warning off.",
            stacklevel=4,
        )


class _Inseparable(Exception):
    """Why copies that ran together cannot be told apart."""


class BatchSizes:
    """An editor that changes nothing and notes the batch size of every attention call."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        self.sizes.add(problem.B)
        return EditedCall(problem, inputs)

    def edit_again(self, problem: Problem, inputs: Inputs) -> EditedCall:
        return EditedCall(problem, inputs)


def _has_rows(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
