"""Run a model with each of many edits, several in one run as copies of the batch."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors.limits import TOKENS_AT_ONCE
from ...core.functional.ambient import listening
from ...core.problem.problem import Problem
from ...nn.token_ids import run
from ..follow.copies import Layout, fresh, leaves, repeated
from ..inspect.edits import Edit
from ..inspect.edits.path import without_paths
from ..inspect.intervene import intervene


class UneditedRun(NamedTuple):
    """One unedited copy of the batch: its metric, output layout and attention calls."""

    baseline: float
    layout: Layout
    problems: Sequence[Problem]

    @property
    def batch_sizes(self) -> set[int]:
        return {problem.B for problem in self.problems}

    @property
    def tokens(self) -> int:
        """The size of the largest call: its batch times its queries or keys, whichever are more."""
        return max(problem.B * max(problem.Tq, problem.Tk) for problem in self.problems)

    @property
    def eps(self) -> float:
        """The rounding of the coarsest dtype."""
        return max(torch.finfo(problem.dtype).eps for problem in self.problems)


class EditedRuns:
    """Runs the model with each of many groups of edits, and measures its output.

    Groups run together, as copies of the batch with their own edits, if the output can be split
    into copies. The first such run has an unedited copy as a control: if its metric differs from
    that of the unedited run by more than rounding, rows of a batch depend on each other. If the
    batch alone changes the rounding, as many unedited copies show it: among them, the control is
    the same number. If copies cannot be separated, each group runs alone, and a warning gives the
    reason.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, unedited: UneditedRun, number: Callable[[Any], float],
        at_once: int | None,
    ) -> None:  # fmt: skip
        self.model, self.inputs, self.unedited, self.number = model, inputs, unedited, number
        self.at_once = at_once or max(1, TOKENS_AT_ONCE // unedited.tokens)
        self._checked = False

    def measure(self, groups: Mapping[str, Sequence[Edit]]) -> Iterator[tuple[str, float]]:
        """Yield the name of each group of edits and the metric of its run, in order."""
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
        """Return why copies cannot run together; "" if they can."""
        sizes = self.unedited.batch_sizes
        if self.unedited.layout.uncut:
            return self.unedited.layout.uncut
        if any(problem.dropout for problem in self.unedited.problems):
            return "dropout with a seed drops different weights in different rows"
        if len(sizes) > 1:
            return f"its attention calls have batches of {', '.join(map(str, sorted(sizes)))}"
        tensors = (x.value for x in leaves(self.inputs) if isinstance(x.value, Tensor))
        rows = {len(x) for x in tensors if x.dim()}
        return "" if sizes <= rows else f"no input has the {max(sizes)} rows of its attention calls"

    def _next(self, rest: Mapping[str, Sequence[Edit]]) -> tuple[list[str], bool]:
        """Return the names of the groups that run next together; or one name, and True, if it runs
        alone."""
        (B,), names = self.unedited.batch_sizes, list[str]()
        for name, group in rest.items():
            if any(edit.for_copy(range(B)) is None for edit in group):
                return (names, False) if names else ([name], True)
            names.append(name)
            if len(names) + (not self._checked) == self.at_once:
                break
        return names, len(names) == 1 and (self._checked or self.at_once > 2)

    def _alone(self, edits: Sequence[Edit]) -> float:
        with intervene(self.model, without_paths(edits, self.model, self.inputs)):
            return self.number(run(self.model, fresh(self.inputs)))

    def _together(self, groups: Sequence[Sequence[Edit]]) -> list[float]:
        """Return the metric of each group, from one run. Raises `_Inseparable`."""
        if self._checked:
            return self._of_copies(groups)
        control = (len(groups) + 1) // 2  # if the model reorders rows, the first may be right
        values = self._of_copies([*groups[:control], (), *groups[control:]])
        unedited = values.pop(control)
        scale = max(
            (abs(x) for x in (*values, self.unedited.baseline) if math.isfinite(x)), default=0
        )
        eps = self.unedited.eps
        if not _agree(unedited, self.unedited.baseline, min(10 * eps, 0.01) * scale):
            among_unedited = self._of_copies([()] * (len(groups) + 1))[control]
            if not (
                _agree(unedited, among_unedited, min(10 * eps, 0.01) * scale)
                and _agree(among_unedited, self.unedited.baseline, math.sqrt(eps) * scale)
            ):
                others = f"{among_unedited:.6g} beside unedited ones, {self.unedited.baseline:.6g}"
                gave = f"an unedited copy gives {unedited:.6g} beside edited ones, {others} alone"
                raise _Inseparable(gave)
        self._checked = True
        return values

    def _of_copies(self, groups: Sequence[Sequence[Edit]]) -> list[float]:
        """Return the metric of a copy with each group of edits. Raises `_Inseparable`."""
        (B,), count = self.unedited.batch_sizes, len(groups)
        edits = [
            copy
            for i, group in enumerate(groups)
            for edit in group
            if (copy := edit.for_copy(range(i * B, (i + 1) * B))) is not None
        ]
        sizes: set[int] = set()
        try:
            inputs = repeated(self.inputs, B, count)
            edits = without_paths(edits, self.model, inputs)
            with listening(lambda call: sizes.add(call.problem.B)), intervene(self.model, edits):
                output = run(self.model, inputs)
        except Exception as error:  # the model may not accept so many rows, or run out of memory
            first, *_ = str(error).splitlines() or [""]
            raise _Inseparable(f"{count} copies raised {type(error).__name__}: {first}") from error
        if sizes != {count * B}:
            listed = ", ".join(map(str, sorted(sizes)))
            raise _Inseparable(f"attention calls of {count * B} rows have batches of {listed}")
        cuts = self.unedited.layout.cut(output, count)
        if isinstance(cuts, str):
            raise _Inseparable(cuts)
        return [self.number(cut) for cut in cuts]

    def _warn(self, why: str) -> None:
        warnings.warn(
            "effects runs one copy of the batch at a time, which is slower, because copies in one "
            f"batch cannot be separated: {why}. With a metric of logits and no labels in the "
            "inputs, copies can run together; at_once=1 turns this warning off.",
            stacklevel=4,
        )


def _agree(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance


class _Inseparable(Exception):
    """The reason why copies that ran together cannot be separated."""
