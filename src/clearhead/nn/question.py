"""What a layer asks of attention, and how its trace begins."""

from typing import NamedTuple

from torch import Tensor, nn

from ..masks import Mask
from ..problem.biases import Bias
from ..results.trace import Step


class Question(NamedTuple):
    """What a layer asks of attention about its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    scale: float | None = None
    dropout: float = 0.0
    bias: Bias | None = None


def both(ours: Mask | None, given: Mask | None) -> Mask | None:
    """The layer's own rule and the one of this call, both of which hold; None means no rule. What
    is no rule is handed on, for attention to refuse."""
    if ours is None or (given is not None and not isinstance(given, Mask)):
        return given
    return ours if given is None else ours & given


def projected(x: str, name: str, layer: nn.Linear) -> str:
    """The formula of a projection, for example ``X · W_query + b``."""
    biased = getattr(layer, "bias", None) is not None  # what wraps a projection may have none
    return f"{x} · {name}" + (" + b" if biased else "")


def inputs(x: Tensor, name: str = "inputs", letter: str = "q") -> Step:
    """The step that stands in front of a layer's trace: what it was given."""
    formula, why = {
        "inputs": ("X", "What the layer is given: one vector per token."),
        "context": ("C", "What the queries look at: keys come from it."),
        "values": ("U", "What the values come from, one vector per key."),
    }[name]
    return Step(name, formula, why, f"b {letter} e" if x.dim() == 3 else f"{letter} e", x)
