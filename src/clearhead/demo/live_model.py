"""Convert the model to data with which a page computes other texts."""

from collections.abc import Sequence

from ..core.engines.reference import WHY
from ..models.report.live_model import LiveModel
from ..nn import RelativePositions
from .model import Decoder

MOST_WEIGHTS = 700_000  # of a model in a page: 2.8 MB


def live_model(model: Decoder, words: Sequence[str]) -> LiveModel | None:
    """Return the model for the page; None if it is large, or if a part of it was removed."""
    config, weights = model.config, model.state_dict()
    usual = config.positions and config.causal and config.scaled
    if not usual or sum(x.numel() for x in weights.values()) > MOST_WEIGHTS:
        return None
    relative = next(x for x in model.modules() if isinstance(x, RelativePositions))
    sizes = config.heads, config.context, relative.near, relative.longest
    return LiveModel(tuple(words), *sizes, WHY, weights)
