"""Load a model that reads text: a transformers checkpoint, or a storyteller."""

from pathlib import Path

from ..demo import is_storyteller, load
from ..hf import Checkpoint
from ..models.report.text_model import TextModel


def load_text_model(path: str | Path | None = None) -> TextModel:
    """Load the model in a folder or file; None means the included one.

    Raises `BadValue` for a model that cannot be loaded.
    """
    return load(path) if path is None or is_storyteller(path) else Checkpoint(path)
