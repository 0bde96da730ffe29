"""Attention on paper, drawn with matplotlib: heat maps, every head, the chain of steps."""

from .figures import heads as heads, heatmap as heatmap, save as save, steps as steps
from .why import scaling as scaling
