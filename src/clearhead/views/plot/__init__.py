"""Draw figures with matplotlib: heat maps, every head, the chain of steps, a model."""

from .canvas import can_draw
from .figures import heads, heatmap, save, steps, suffix_of
from .report import entropy_by_layer, head, image, model, words
from .results import attribution, caches, effects, training, why

__all__ = [
    "attribution", "caches", "can_draw", "effects", "entropy_by_layer", "head", "heads", "heatmap",
    "image", "model", "save", "steps", "suffix_of", "training", "why", "words",
]  # fmt: skip
