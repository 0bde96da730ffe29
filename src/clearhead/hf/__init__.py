"""Use clearhead in Hugging Face transformers: ``attn_implementation="clearhead"``.

transformers looks up two functions by that name: one creates the mask, the other computes
attention. `register` sets both; `supports` checks whether a model calls them.
"""

from .checkpoint import Checkpoint
from .register import NAME, register
from .supports import Support, supports

__all__ = [
    "NAME",
    "Checkpoint",
    "Support",
    "register",
    "supports",
]
