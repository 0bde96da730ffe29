"""Load a model that reads text: a checkpoint of transformers, or the demonstration model."""

from pathlib import Path

from ..demo import is_storyteller, load
from ..hf import Checkpoint
from ..inspection.text_model import TextModel


def load_text_model(path: str | Path | None = None) -> TextModel:
    """The model in a folder or file; None means the one that comes with clearhead.

    Raises `BadValue` for one that cannot be loaded.
    """
    return load(path) if path is None or is_storyteller(path) else Checkpoint(path)
