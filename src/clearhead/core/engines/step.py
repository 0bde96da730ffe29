"""Hold one named step of an attention call, as data."""

from dataclasses import dataclass

from torch import Tensor

from ..errors import BadValue
from ..formatting import AXES
from ..torch_state import loadable


@loadable
@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One named tensor between the inputs and the output, with its formula.

    `axes` names each dimension of `tensor` by a letter of `AXES`, for example
    ``"b h q k"`` for the weights; `why` is a sentence that gives the reason for the step.
    """

    name: str
    formula: str
    why: str
    axes: str
    tensor: Tensor

    def __post_init__(self) -> None:
        if len(self.axes.split()) != self.tensor.dim():
            shape = tuple(self.tensor.shape)
            gave = f"Step {self.name!r} has axes {self.axes!r} and a tensor of shape {shape}."
            rule = "a step names every dimension of its tensor by one letter."
            raise BadValue(gave, rule, "name all dimensions, for example axes='b h q k'.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.tensor.shape)

    def axis_name(self, letter: str) -> str:
        """Return the name of an axis. Before the projections, queries and keys are tokens."""
        if letter in "qk" and set(self.axes.split()) <= {"b", letter, "e"}:
            return "token"
        return AXES.get(letter, letter)

    def __repr__(self) -> str:
        return f"Step({self.name!r}, {self.formula!r}, {self.axes!r}, shape {self.shape})"
