"""Draw figures with matplotlib: heat maps, every head, the chain of steps, a model."""

from .attribution import attribution
from .caches import caches
from .canvas import can_draw
from .effects import effects
from .figures import heads, heatmap, save, steps, suffix_of
from .report import entropy_by_layer, head, model, received
from .training import training
from .why import why

__all__ = [
    "attribution", "caches", "can_draw", "effects", "entropy_by_layer", "head", "heads", "heatmap",
    "model", "received", "save", "steps", "suffix_of", "training", "why",
]  # fmt: skip
