"""The steps of one attention call, named: pure data, no arithmetic.

The views draw a `Step` from its `axes` alone, so a new step is one more `Step`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from .errors import BadValue, as_index
from .formatting import AXES, ShownInNotebook
from .torch_state import loadable


@loadable
@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One named tensor on the way from the inputs to the output.

    `axes` names each dimension of `tensor` by a letter of `AXES`, for example
    ``"b h q k"`` for the weights; `why` is one sentence of reason.
    """

    name: str
    formula: str
    why: str
    axes: str
    tensor: Tensor

    def __post_init__(self) -> None:
        if len(self.axes.split()) != self.tensor.dim():
            raise BadValue(
                f"Step {self.name!r} has axes {self.axes!r} and a tensor of shape "
                f"{tuple(self.tensor.shape)}.",
                "a step names every dimension of its tensor, one letter each.",
                "name them all, for example axes='b h q k'.",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        return tuple(self.tensor.shape)

    def axis_name(self, letter: str) -> str:
        """The name of one of its axes. Before the projections, queries and keys are tokens."""
        if letter in "qk" and set(self.axes.split()) <= {"b", letter, "e"}:
            return "token"
        return AXES.get(letter, letter)

    def __repr__(self) -> str:
        return f"Step({self.name!r}, {self.formula!r}, {self.axes!r}, shape {self.shape})"


@loadable
@dataclass(frozen=True, eq=False)
class Trace(ShownInNotebook):
    """The steps of one attention call, in order. `trace["weights"]` is a tensor, `trace.steps` all.

    The tensors may be those that were passed in: read them, and write to copies.

    `queries` and `keys` are the tokens that label the rows and the columns, or None where none were
    given. `about` describes the call in a line, and `settings` for programs (mask, scale, softcap,
    bias, dropout, seed). `first` is for a trace that is part of a larger one: by the letter of an
    axis, the number of its first position there.
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
        """The `Step` of that name. Raises `BadValue` if the trace has none."""
        for step in self.steps:
            if step.name == name:
                return step
        raise BadValue(
            f"There is no step {name!r} in this trace.",
            "a trace holds the steps that happened: " + ", ".join(self.names) + ".",
            "ask for one of these; a step such as 'capped' is there only if it was requested.",
        )

    def __getitem__(self, name: str) -> Tensor:
        return self.step(name).tensor

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def before(self, *steps: Step) -> "Trace":
        """The same trace with `steps` in front: how query, key and value were computed."""
        return replace(self, steps=(*steps, *self.steps))

    def made_by(self, **formulas: str) -> "Trace":
        """The same trace with other formulas for some steps, by name: for example the projection by
        which a layer computed its query."""
        steps = (
            replace(s, formula=formulas[s.name]) if s.name in formulas else s for s in self.steps
        )
        return replace(self, steps=tuple(steps))

    def sequence(self, which: int) -> "Trace":
        """The same trace of one sequence of a batch, counted from 0: views show the first.

        Raises `BadValue` for a sequence that is not there.
        """
        index, count = self._index(which, "b", "Sequence", "holds")
        about = self.about if count == 1 else f"{self.about}, sequence {index}"
        return replace(self._only({"b": index}), about=about)

    def head(self, which: int) -> "Trace":
        """The same trace of one query head, counted from 0, and of the key head that it reads.

        Raises `BadValue` for a head that is not there.
        """
        index, H = self._index(which, "h", "Head", "has")
        indices = {"h": index, "g": index // (H // (self.size("g") or 1))}
        first = {letter: self.number(letter, i) for letter, i in indices.items()}
        return replace(self._only(indices), first={**(self.first or {}), **first})

    def _index(self, which: int, letter: str, name: str, holds: str) -> tuple[int, int]:
        """An index into an axis, counted from 0, and the axis's size: 1 where no step has it."""
        count = self.size(letter) or 1
        rule = f"this trace {holds} {count}, counted from 0."
        return as_index(name, which, count, rule, "ask for one of these."), count

    def _only(self, indices: dict[str, int]) -> "Trace":
        """One index of each axis in `indices`; these axes stay, with size 1."""
        steps = []
        for step in self.steps:
            tensor = step.tensor
            for axis, letter in enumerate(step.axes.split()):
                if letter in indices:
                    tensor = tensor.narrow(axis, indices[letter], 1)
            steps.append(replace(step, tensor=tensor))
        return replace(self, steps=tuple(steps))

    def size(self, letter: str) -> int | None:
        """The size of the axis of that letter, None where no step has it."""
        for step in self.steps:
            if letter in step.axes.split():
                return step.shape[step.axes.split().index(letter)]
        return None

    def labels(self, letter: str, size: int) -> list[str]:
        """The labels of an axis: tokens if it has any, else numbers."""
        tokens = {"q": self.queries, "k": self.keys}.get(letter)
        if tokens and len(tokens) == size:
            return list(tokens)
        return [str(self.number(letter, i)) for i in range(size)]

    def number(self, letter: str, index: int) -> int:
        """The number that views show for an index of an axis: counted from 0, or from `first`."""
        return index + (self.first or {}).get(letter, 0)

    def __repr__(self) -> str:
        rows = [
            (step.name, " ".join(map(str, step.shape)), step.axes, step.formula) for step in self
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.about or "Trace", *("  " + line.rstrip() for line in lines)])
