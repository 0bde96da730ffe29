"""Attention on paper, drawn with matplotlib: heat maps, every head, the chain of steps, a model."""

from .figures import (
    heads as heads,
    heatmap as heatmap,
    save as save,
    steps as steps,
    suffix_of as suffix_of,
)
from .report import (
    entropy_by_layer as entropy_by_layer,
    model as model,
    received as received,
)
from .why import scaling as scaling
