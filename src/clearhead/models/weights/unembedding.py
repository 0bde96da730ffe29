"""Find the unembedding of a model, and parse the target whose logits are attributed.

Letters: T tokens, d model size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, whole_number
from ...hf.projections import readable_matrix
from ..follow.run import ModuleRun
from .norms_and_rotations import wide_dtype

_POSITIONS_COMPARED = 8


class Unembedding(NamedTuple):
    """The last linear module: its rows (words, d) and bias, its input (T, d) and output `raw`.

    The model's logits are `scale` times `raw` (T, words), perhaps with a soft cap.
    """

    rows: Tensor
    bias: Tensor | None
    input: Tensor
    raw: Tensor
    scale: float


def find_unembedding(model: nn.Module, last: ModuleRun | None, logits: Tensor) -> Unembedding:
    if last is not None and last.result.shape == logits.shape:
        matrix, bias = readable_matrix(last.module, last.name)
        raw = last.result.detach()[0]
        if (scale := _scale(model, raw, logits[0])) is not None:
            x = last.inputs[0][0]
            return Unembedding(matrix.T, bias, x.to(wide_dtype(x)), raw, scale)
    name = f", {last.name}" if last is not None else ""
    gave = f"Logits of the {type(model).__name__} are not those of its last linear module{name}."
    rule = "logits are the output of a linear module, times a number, perhaps with a soft cap."
    hint = "pass a model with a head for the next token, such as one of AutoModelForCausalLM."
    raise BadValue(gave, rule, hint)


def _scale(model: nn.Module, raw: Tensor, logits: Tensor) -> float | None:
    """Find the factor between the output of the unembedding and the logits, at a few positions.

    Returns None if there is more between them than a factor and a soft cap.
    """
    some = torch.linspace(0, len(raw) - 1, min(len(raw), _POSITIONS_COMPARED)).long()
    a, b = raw[some].double(), logits[some].double()
    tolerance = max(1e-5, 4 * torch.finfo(raw.dtype).eps) * float(b.abs().max())
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    if cap is not None:
        return 1.0 if bool(((cap * torch.tanh(a / cap) - b).abs() <= tolerance).all()) else None
    largest = a.abs().argmax()
    scale = float(b.flatten()[largest] / a.flatten()[largest])
    scale = 1.0 if abs(scale - 1) < 1e-5 else scale
    return scale if bool(((a * scale - b).abs() <= tolerance).all()) else None


class Target(NamedTuple):
    """The ids whose logits are attributed, (T,), and those that are subtracted, or None."""

    plus: Tensor
    minus: Tensor | None
    center: bool

    def of_words(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Select the numbers of the target at each position, (words, ...) -> (T, ...)."""
        picked = x[self.plus].to(dtype)
        if self.minus is not None:
            return picked - x[self.minus].to(dtype)
        return picked - x.mean(0, dtype=dtype) if self.center else picked

    def of_logits(self, logits: Tensor) -> Tensor:
        """Select the logits of the target, (T, words) -> (T,)."""
        at = torch.arange(len(self.plus), device=logits.device)
        picked = logits[at, self.plus].double()
        if self.minus is not None:
            return picked - logits[at, self.minus].double()
        return picked - logits.mean(-1, dtype=torch.float64) if self.center else picked


def parse_target(target: object, text: Tensor, words: int, center: bool) -> Target:
    rule = f"a target is 'next', an id below {words}, ids (T,), or logit_difference(a, b)."
    hint = "pass the id of a token, as the model's tokenizer gives it."
    T, device = len(text), text.device
    tokens = getattr(target, "tokens", None)  # the attribute of a logit_difference
    if isinstance(target, str) and target == "next":
        if T < 2:
            raise BadValue("target='next' for a text of 1 token.", rule, "pass a longer text.")
        return Target(text[1:], None, center)
    targets = [target] if tokens is None else list(tokens)
    ids = []
    for x in targets:
        number = whole_number(x)
        if number is None and isinstance(x, Tensor) and not x.is_floating_point():
            per_position = tokens is None and x.shape == (T,)
            ids.append(x.to(device, torch.long).expand(T) if per_position or x.shape == (1,) else x)
        elif number is not None:
            ids.append(torch.full((T,), number, device=device))
        else:
            raise BadType(f"logit_attribution got target={target!r}.", rule, hint)
    for x in ids:
        if x.shape != (T,) or not bool(((x >= 0) & (x < words)).all()):
            raise BadValue(f"logit_attribution got target={target!r}, of {T} ids.", rule, hint)
    return Target(ids[0], ids[1] if len(ids) > 1 else None, center)
