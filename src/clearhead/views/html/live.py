"""Convert a small model to data that the page can run (`page/src/live.js`)."""

from torch import Tensor

from ...models.report.live_model import LiveModel
from .document import encoded, fields_of
from .schema import Model, Rows


def model_data(model: LiveModel) -> Model:
    """Return the words, sizes and weights of a model for the script."""
    weights = {name: _scaled_rows(x) for name, x in model.weights.items()}
    return fields_of(Model, model, weights=weights)


def _scaled_rows(x: Tensor) -> Rows:
    """Encode a matrix with 24 bits per number: each row as integers times its own unit.

    The error of a number is at most 1/2^24 of the largest in its row, as in float32.
    """
    rows = x.detach().double().reshape(-1, x.shape[-1])
    units = (rows.abs().amax(-1, keepdim=True) / (2**23 - 2)).clamp(min=1e-30).float()
    integers = (rows / units.double()).round().long()
    return {
        "stored": list(rows.shape),
        "units": encoded(units.flatten(), "f4"),
        "numbers": encoded(integers >> 8, "i2"),
        "rest": encoded(integers & 255, "u1"),
    }
