"""A small model for the page, which computes it by itself (`page/src/live.js`)."""

from torch import Tensor

from ...inspection.report.live_model import LiveModel
from .document import encoded
from .schema import Model, Rows


def model_data(model: LiveModel) -> Model:
    """What the script reads of a model: its words, its sizes and its weights."""
    return {
        "words": list(model.words),
        "heads": model.heads,
        "context": model.context,
        "near": model.near,
        "longest": model.longest,
        "why": dict(model.why),
        "weights": {name: _scaled_rows(x) for name, x in model.weights.items()},
    }


def _scaled_rows(x: Tensor) -> Rows:
    """A matrix in 16 bits a number: each row as whole numbers of a unit of its own.

    A number is right to 1/65534 of the largest in its row; half precision keeps 3 digits of each.
    """
    rows = x.detach().double().reshape(-1, x.shape[-1])
    units = (rows.abs().amax(-1, keepdim=True) / 32767).clamp(min=1e-30)
    return {
        "stored": list(rows.shape),
        "units": encoded(units.flatten(), "f4"),
        "numbers": encoded((rows / units).round(), "i2"),
    }
