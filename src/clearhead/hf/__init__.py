"""Plugs into Hugging Face transformers: ``attn_implementation="clearhead"``.

transformers asks two functions by one name: one makes the mask, the other attends. `register` sets
both.
"""

from .checkpoint import Checkpoint
from .register import NAME, register

__all__ = [
    "NAME",
    "Checkpoint",
    "register",
]
