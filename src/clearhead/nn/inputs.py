"""Hold the inputs that layers pass to attention, and make the steps that they add to a trace."""

from typing import Any, TypeAlias

from torch import Tensor, nn

from ..core.functional.trace import Step
from ..core.masks import Mask
from ..core.problem.problem import Inputs

# The inputs of `attention` that a layer computes from its own, and its other arguments.
Projection: TypeAlias = tuple[Inputs, dict[str, Any]]


def combine_masks(own: Mask | None, of_call: Mask | None) -> Mask | None:
    """Combine a layer's own mask with the mask of a call; None means no mask.

    Another object is returned as it is, because attention refuses it.
    """
    if own is None or (of_call is not None and not isinstance(of_call, Mask)):
        return of_call
    return own if of_call is None else own & of_call


def projection_formula(x: str, name: str, layer: nn.Linear) -> str:
    """Write the formula of a projection, for example ``X · W_query + b``."""
    biased = getattr(layer, "bias", None) is not None  # a module around a Linear may have no bias
    return f"{x} · {name}" + (" + b" if biased else "")


def input_step(x: Tensor, name: str = "inputs", letter: str = "q") -> Step:
    """Return the step of one of a layer's inputs."""
    formula, why = {
        "inputs": ("X", "The input of the layer: one vector per token."),
        "context": ("C", "The input that the queries look at, from which the keys are projected."),
        "values": ("U", "The input from which the values are projected, one vector per key."),
    }[name]
    return Step(name, formula, why, f"b {letter} e" if x.dim() == 3 else f"{letter} e", x)
