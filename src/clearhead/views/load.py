"""Load a model that reads text: a checkpoint, one of the hub in the local cache, a storyteller; or
one that reads pictures."""

import re
from pathlib import Path

from ..core.errors import BadValue
from ..demo import is_storyteller, load
from ..hf import Checkpoint, open_checkpoint
from ..hf.register import transformers
from ..models.report.text_model import TextModel

HUB_NAME = r"(?:[\w.-]+/)?[\w.-]*\w"


def load_text_model(path: str | Path | None = None, *, pictures: bool = False) -> TextModel:
    """Load the model in a folder or file, or one of the Hugging Face hub that is in the local
    cache, by its name; None means the included one. With `pictures`, a vision model may be loaded.

    Nothing is downloaded. Raises `BadValue` for a model that cannot be loaded.
    """
    if path is None or is_storyteller(path):
        return load(path)
    name = str(path)
    is_name = not Path(path).exists() and re.fullmatch(HUB_NAME, name) is not None
    return (open_checkpoint if pictures else Checkpoint)(_cached(name) if is_name else path)


def _cached(name: str) -> str:
    """Return the folder of a model of the hub in the local cache."""
    transformers()  # raises `Missing`; huggingface_hub is one of its packages
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError as error:
        files = '"*.json" "*.safetensors" "*.txt" "*.model"'
        gave = f"{name!r} is neither a path that exists, nor a model in the cache of the hub."
        rule = "a model is a folder, a file, or a name of the Hugging Face hub that was downloaded."
        hint = f"check the path; or download the model: hf download {name} --include {files}"
        raise BadValue(gave, rule, hint) from error
