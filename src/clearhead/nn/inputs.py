"""What the layers pass to attention, and the steps and formulas that they add to its trace."""

from typing import NamedTuple

from torch import Tensor, nn

from ..masks import Mask
from ..problem.biases import Bias
from ..trace import Step


class AttentionInputs(NamedTuple):
    """The arguments of `attention` that a layer computes from its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scale: float | None = None
    dropout: float = 0.0
    bias: Bias | None = None


def combine_masks(own: Mask | None, given: Mask | None) -> Mask | None:
    """The layer's own mask and the one of this call; None means no mask. What is not a mask is
    passed on, for attention to refuse."""
    if own is None or (given is not None and not isinstance(given, Mask)):
        return given
    return own if given is None else own & given


def projection_formula(x: str, name: str, layer: nn.Linear) -> str:
    """The formula of a projection, for example ``X · W_query + b``."""
    biased = getattr(layer, "bias", None) is not None  # a module that wraps a Linear may have none
    return f"{x} · {name}" + (" + b" if biased else "")


def input_step(x: Tensor, name: str = "inputs", letter: str = "q") -> Step:
    """The first step of a layer's trace: one of its inputs."""
    formula, why = {
        "inputs": ("X", "What the layer is given: one vector per token."),
        "context": ("C", "What the queries look at: keys come from it."),
        "values": ("U", "What the values come from, one vector per key."),
    }[name]
    return Step(name, formula, why, f"b {letter} e" if x.dim() == 3 else f"{letter} e", x)
