"""Every step of one attention call, named: pure data, no arithmetic.

The views draw a `Trace` from its `axes` alone, so a new step is one more `Step`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ..errors import BadValue, whole_number

AXES = {
    "b": "sequence",
    "h": "head",
    "g": "key head",
    "q": "query",
    "k": "key",
    "d": "feature",
    "v": "value feature",
    "e": "embedding feature",
}


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

    def called(self, letter: str) -> str:
        """The name of one of its axes. Before they are projected, queries and keys are tokens."""
        if letter in "qk" and set(self.axes.split()) <= {"b", letter, "e"}:
            return "token"
        return AXES.get(letter, letter)

    def __repr__(self) -> str:
        return f"Step({self.name!r}, {self.formula!r}, {self.axes!r}, shape {self.shape})"


@dataclass(frozen=True, eq=False)
class Trace:
    """What happened, in order. `trace["weights"]` is a tensor, `trace.steps` all of them.

    The tensors may be those that were passed in: read them, and write to copies.

    `queries` and `keys` are the tokens that label the rows and the columns, or
    None where none were given; `about` says in a line what was asked, and `settings` holds it for
    programs (mask, scale, softcap, bias, dropout, seed). `first` is for a trace that was cut out of
    a larger one: by the letter of an axis, the number that its first place has there.
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
        """The whole `Step` of that name. Raises `BadValue` when it did not happen."""
        for step in self.steps:
            if step.name == name:
                return step
        raise BadValue(
            f"There is no step {name!r} in this trace.",
            "a trace holds the steps that happened: " + ", ".join(self.names) + ".",
            "ask for one of these; a step such as 'capped' appears only when it was asked for.",
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
        """The same trace with `steps` in front: how query, key and value came about."""
        return replace(self, steps=(*steps, *self.steps))

    def made_by(self, **formulas: str) -> "Trace":
        """The same trace with other formulas for some steps: where a layer got its query from."""
        steps = (
            replace(s, formula=formulas[s.name]) if s.name in formulas else s for s in self.steps
        )
        return replace(self, steps=tuple(steps))

    def sequence(self, which: int) -> "Trace":
        """The same trace of one sequence of a batch, counted from 0: views show the first.

        Raises `BadValue` for one that is not there.
        """
        place, count = self._place(which, "b", "Sequence", "holds")
        about = self.about if count == 1 else f"{self.about}, sequence {place}"
        return replace(self._only({"b": place}), about=about)

    def head(self, which: int) -> "Trace":
        """The same trace of one query head, counted from 0, and of the key head that it reads.

        Raises `BadValue` for one that is not there.
        """
        place, H = self._place(which, "h", "Head", "has")
        places = {"h": place, "g": place // (H // (self.size("g") or 1))}
        first = {letter: self.number(letter, at) for letter, at in places.items()}
        return replace(self._only(places), first={**(self.first or {}), **first})

    def _place(self, which: int, letter: str, asked: str, holds: str) -> tuple[int, int]:
        """A place of an axis, counted from 0, and the axis's size: 1 where no step has it."""
        place, count = whole_number(which), self.size(letter) or 1
        if place is None or not -count <= place < count:
            raise BadValue(
                f"{asked} {which!r} of this trace was asked for.",
                f"it {holds} {count}, counted from 0.",
                "ask for one of these.",
            )
        return place % count, count

    def _only(self, places: dict[str, int]) -> "Trace":
        """One place of some axes, which stay, of size 1."""
        steps = []
        for step in self.steps:
            tensor = step.tensor
            for axis, letter in enumerate(step.axes.split()):
                if letter in places:
                    tensor = tensor.narrow(axis, places[letter], 1)
            steps.append(replace(step, tensor=tensor))
        return replace(self, steps=tuple(steps))

    def size(self, letter: str) -> int | None:
        """How long the axis of that letter is, None where no step has it."""
        for step in self.steps:
            if letter in step.axes.split():
                return step.shape[step.axes.split().index(letter)]
        return None

    def labels(self, letter: str, size: int) -> list[str]:
        """What to write along an axis: tokens where there are any, else numbers."""
        tokens = {"q": self.queries, "k": self.keys}.get(letter)
        if tokens and len(tokens) == size:
            return list(tokens)
        return [str(self.number(letter, i)) for i in range(size)]

    def number(self, letter: str, place: int) -> int:
        """What place `place` of an axis is called: counted from 0, or from `first`."""
        return place + (self.first or {}).get(letter, 0)

    def __repr__(self) -> str:
        rows = [
            (step.name, " ".join(map(str, step.shape)), step.axes, step.formula) for step in self
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.about or "Trace", *("  " + line.rstrip() for line in lines)])
