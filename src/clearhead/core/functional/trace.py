"""Hold the named steps of one attention call, as data.

Views draw a `Step` from its `axes` alone, so they also draw steps that are added later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engines.step import Step
from ..errors import BadValue, as_index
from ..files.results import Savable, data_frame
from ..formatting import AXES, ShownInNotebook, aligned
from ..torch_state import loadable

if TYPE_CHECKING:
    import pandas


@loadable
@dataclass(frozen=True, eq=False)
class Trace(ShownInNotebook, Savable):
    """The steps of one attention call, in order: `trace["weights"]` is the tensor of a step.

    A tensor may be an argument of the call itself, so do not write to it.

    `queries` and `keys` are the tokens that label rows and columns, or None. `about` describes the
    call in a line; `settings` holds its mask, scale, softcap, bias, dropout and seed. `first` maps
    the letter of an axis to the number of its first position, in a trace that is part of a larger
    one.
    """

    steps: tuple[Step, ...]
    queries: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    about: str = ""
    settings: dict[str, object] | None = None
    first: dict[str, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps, in order."""
        return tuple(step.name for step in self.steps)

    def step(self, name: str) -> Step:
        """Return the `Step` of this name. Raises `BadValue` if the trace has no such step."""
        for step in self.steps:
            if step.name == name:
                return step
        rule = "a trace holds the steps that happened: " + ", ".join(self.names) + "."
        hint = "name one of these; a step such as 'capped' needs its keyword in the call."
        raise BadValue(f"There is no step {name!r} in this trace.", rule, hint)

    def __getitem__(self, name: str) -> Tensor:
        return self.step(name).tensor

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def before(self, *steps: Step) -> "Trace":
        """Return this trace with `steps` in front, which compute query, key and value."""
        return replace(self, steps=(*steps, *self.steps))

    def with_formulas(self, **formulas: str) -> "Trace":
        """Return this trace with other formulas for some steps: ``query="x W_Q"``."""
        steps = (
            replace(s, formula=formulas[s.name]) if s.name in formulas else s for s in self.steps
        )
        return replace(self, steps=tuple(steps))

    def sequence(self, which: int) -> "Trace":
        """Return the trace of one sequence of a batch, counted from 0. Views show the first.

        Raises `BadValue` if the batch has no such sequence.
        """
        index, count = self._index(which, "b", "Sequence", "holds")
        about = self.about if count == 1 else f"{self.about}, sequence {index}"
        return replace(steps_at(self, {"b": [index]}), about=about)

    def head(self, which: int) -> "Trace":
        """Return the trace of one query head, counted from 0, and of the KV head that it reads.

        Raises `BadValue` if there is no such head.
        """
        index, H = self._index(which, "h", "Head", "has")
        indices = {"h": index, "g": index // (H // (self.size("g") or 1))}
        first = {letter: self.number(letter, i) for letter, i in indices.items()}
        one = steps_at(self, {letter: [i] for letter, i in indices.items()})
        return replace(one, first={**(self.first or {}), **first})

    def _index(self, which: int, letter: str, name: str, holds: str) -> tuple[int, int]:
        """Return an index into an axis, counted from 0, and the axis's size (1 if it is absent)."""
        count = self.size(letter) or 1
        rule = f"this trace {holds} {count}, counted from 0."
        return as_index(name, which, count, rule), count

    def size(self, letter: str) -> int | None:
        """Return the size of an axis, by its letter; None if no step has this axis."""
        for step in self.steps:
            if letter in step.axes.split():
                return step.shape[step.axes.split().index(letter)]
        return None

    def labels(self, letter: str, size: int) -> list[str]:
        """Return the labels of an axis: its tokens if it has any, else numbers."""
        tokens = {"q": self.queries, "k": self.keys}.get(letter)
        if tokens and len(tokens) == size:
            return list(tokens)
        return [str(self.number(letter, i)) for i in range(size)]

    def number(self, letter: str, index: int) -> int:
        """Return the number that views show for an index of an axis, counted from 0 or `first`."""
        return index + (self.first or {}).get(letter, 0)

    def to_pandas(self, step: str = "weights") -> "pandas.DataFrame":
        """Return a table with one row per number of a step.

        Its columns are the names of the axes, such as head, query and key, the tokens of queries
        and keys if they are known, and the value. Raises `BadValue` if there is no such step, and
        `Missing` without pandas.
        """
        chosen = self.step(step)
        letters = chosen.axes.split()
        tokens = {x: self.labels(x, chosen.shape[letters.index(x)]) for x in "qk" if x in letters}
        rows = []
        for index, value in zip(
            product(*map(range, chosen.shape)),
            chosen.tensor.detach().flatten().tolist(),
            strict=True,
        ):
            row: dict[str, object] = {}
            for letter, i in zip(letters, index, strict=True):
                row[AXES.get(letter, letter)] = self.number(letter, i)
                if letter in tokens and {"q": self.queries, "k": self.keys}[letter]:
                    row[f"{AXES[letter]} token"] = tokens[letter][i]
            rows.append({**row, step: value})
        return data_frame(rows)

    def __repr__(self) -> str:
        rows = [
            ("", step.name, " ".join(map(str, step.shape)), step.axes, step.formula)
            for step in self
        ]
        return "\n".join([self.about or "Trace", *aligned(rows)])


def steps_at(trace: Trace, indices: Mapping[str, Sequence[int]]) -> Trace:
    """Return a copy of all steps at some indices of each axis in `indices`, by its letter.

    The memory of the others can be freed.
    """
    steps = []
    for step in trace:
        tensor, axes = step.tensor, step.axes.split()
        for letter in indices.keys() & set(axes):
            index = torch.tensor(indices[letter], dtype=torch.long, device=tensor.device)
            tensor = tensor.index_select(axes.index(letter), index)
        steps.append(replace(step, tensor=tensor))
    return replace(trace, steps=tuple(steps))
