"""A model that reads text: a Hugging Face checkpoint, or a storyteller.

Both have `name`, `module` and `predictor` (what runs on a text, and what predicts the next token),
`depth`, `words`, `tokens_and_inputs` and `explain`.
"""

from pathlib import Path
from typing import TypeAlias

from ..hf import Checkpoint
from ..storyteller import Storyteller, is_storyteller, load

TextModel: TypeAlias = Checkpoint | Storyteller


def load_text_model(path: str | Path | None = None) -> TextModel:
    """The model in a folder or file; None means the storyteller that comes with clearhead. Raises
    `BadValue` for one that cannot be loaded."""
    return load(path) if path is None or is_storyteller(path) else Checkpoint(path)
