"""`explain_weights`: a `Trace` of attention weights that another program computed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of, must_be_strided
from ..torch_state import has_values
from .explain import labels_of
from .trace import Step, Trace

ROUNDING = 2.0**-7  # the error of a sum of weights that were rounded to bfloat16
WHY = "Another program computed these weights. Their scores and values are unknown."


def explain_weights(
    weights: Tensor, *, tokens: Sequence[str] | None = None, key_tokens: Sequence[str] | None = None
) -> Trace:
    """Return a `Trace` of attention weights that another program computed, for the views.

    Its only step is `weights`. Queries, keys, values and scores do not follow from the weights, so
    views that need them refuse the trace. `report_weights` accepts the layers of a model.

    Args:
        weights: the softmax, (B, H, Tq, Tk); leading dimensions may be missing. A tensor, or an
            array that NumPy reads.
        tokens: labels of the queries, and of the keys if Tq = Tk and `key_tokens` is None; None
            means numbers.
        key_tokens: labels of the keys.

    A row may sum to less than 1, as with sinks, or to 0 for a fully masked query; `Step.why` has
    the smallest sum.

    Raises:
        BadValue, BadType: anything else than numbers in two to four dimensions; a negative number,
            NaN, or a row that sums to more than 1; labels that do not fit.
    """
    tensor = _as_tensor(weights)
    if not 2 <= tensor.dim() <= 4:
        raise BadValue(
            f"The weights have the shape {tuple(tensor.shape)}.",
            "the weights of a layer are (Tq, Tk), (H, Tq, Tk) or (B, H, Tq, Tk).",
            "for several layers, pass report_weights a list with the weights of each.",
        )
    least = _check(tensor)
    Tq, Tk = tensor.shape[-2:]
    queries, keys = labels_of(Tq, Tk, tokens, key_tokens)
    letters, names = "bhqk"[-tensor.dim() :], ("B", "H", "Tq", "Tk")[-tensor.dim() :]
    sizes = " ".join(f"{name}={n}" for name, n in zip(names, tensor.shape, strict=True))
    about = f"{sizes}, weights that another program computed"
    sums = "" if least is None else _note_on_sums(least)
    step = Step("weights", "", WHY + sums, " ".join(letters), tensor)
    return Trace((step,), queries, keys, about, {})


def _as_tensor(weights: object) -> Tensor:
    """Return the weights as a tensor. Raises `BadType` for anything but an array of numbers."""
    if weights is None or isinstance(weights, list | tuple):
        raise BadType(
            f"The weights are {kind_of(weights)}.",
            "the weights of a layer are a tensor, or an array that NumPy reads.",
            'transformers returns None unless the model has attn_implementation="eager".'
            if weights is None
            else "pass the element of one layer, or all layers to report_weights.",
        )
    try:
        tensor = weights if isinstance(weights, Tensor) else torch.from_numpy(np.array(weights))
    except TypeError:  # a dtype that torch does not have
        tensor = None
    if tensor is None or not tensor.is_floating_point() or not has_values(tensor):
        kind = " ".join(str(getattr(weights, name, "")) for name in ("dtype", "device")).strip()
        raise BadType(
            f"The weights are {kind_of(weights)}{f' of {kind}' if kind else ''}.",
            "the weights of a layer are floating-point numbers, with their values.",
            "pass the output of the softmax.",
        )
    must_be_strided("weights", tensor)
    return tensor.detach()


def _check(weights: Tensor) -> float | None:
    """Return the smallest sum of a row that is not fully masked, if it is less than 1.

    Raises `BadValue` for anything but weights.
    """
    if not weights.numel():
        return None
    least, largest = (float(x) for x in weights.aminmax())
    if not (least >= 0 and largest < float("inf")):  # NaN compares as False
        raise BadValue(
            f"The weights are between {least:g} and {largest:g}.",
            "weights are the output of a softmax: finite, and 0 or more.",
            "pass the weights and not the scores; for NaN in the rows of masked queries, pass "
            "weights.nan_to_num(0).",
        )
    sums = weights.sum(-1, dtype=torch.float64)
    if float(sums.max()) > 1 + ROUNDING:
        raise BadValue(
            f"A row of the weights sums to {float(sums.max()):.4g}.",
            "the weights of a query on all keys sum to at most 1.",
            "queries are the rows, and keys the columns. If the weights had dropout, compute them "
            "again with model.eval().",
        )
    rest = sums[sums > 0]
    return float(rest.min()) if rest.numel() and float(rest.min()) < 1 - ROUNDING else None


def _note_on_sums(least: float) -> str:
    return (
        f" Some rows sum to less than 1, one to {least:.2f}: the rest is not on these keys, as "
        "with a sink."
    )
