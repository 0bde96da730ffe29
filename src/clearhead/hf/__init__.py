"""Use clearhead in Hugging Face transformers: ``attn_implementation="clearhead"``.

transformers looks up two functions by that name: one creates the mask, the other computes
attention. `register` sets both; `supports` checks whether a model calls them. `cache` makes a cache
for generation that does not copy what it stores, and `press` a press of KVPress.
"""

from .cache import cache
from .checkpoint import Checkpoint
from .image_checkpoint import ImageCheckpoint
from .open_checkpoint import open_checkpoint
from .press import press
from .register import NAME, register
from .sound_checkpoint import SoundCheckpoint
from .supports import Support, supports

__all__ = [
    "NAME", "Checkpoint", "ImageCheckpoint", "SoundCheckpoint", "Support", "cache",
    "open_checkpoint", "press", "register", "supports",
]  # fmt: skip
