"""Open a checkpoint by the files in its folder: of texts, of images or of sounds."""

from pathlib import Path

from .checkpoint import Checkpoint
from .image_checkpoint import ImageCheckpoint
from .sound_checkpoint import SoundCheckpoint

_TOKENIZERS = ("tokenizer*.json", "vocab*", "*.model", "spiece*", "merges.txt")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at a path: a `SoundCheckpoint` if its folder has Whisper's feature
    extractor, an `ImageCheckpoint` if it has an image processor and no tokenizer, else a
    `Checkpoint`. Raises `BadValue` as these do."""
    processor = Path(path, "preprocessor_config.json")
    if not processor.is_file():
        return Checkpoint(path)
    if "WhisperFeatureExtractor" in processor.read_text(encoding="utf-8", errors="replace"):
        return SoundCheckpoint(path)
    has_words = any(file for name in _TOKENIZERS for file in Path(path).glob(name))
    return Checkpoint(path) if has_words else ImageCheckpoint(path)
