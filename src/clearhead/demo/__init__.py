"""The included model: a small decoder of `clearhead.nn`, trained on short stories.

`load()` returns it. Its grammar, training and measurements are in `examples/storyteller`.
"""

from .measured import MeasuredHead
from .model import Config, Decoder
from .storyteller import Reading, Storyteller, WordLink, is_storyteller, keep_table, load
from .vocabulary import Vocabulary

__all__ = [
    "Config", "Decoder", "MeasuredHead", "Reading", "Storyteller", "Vocabulary", "WordLink",
    "is_storyteller", "keep_table", "load",
]  # fmt: skip
