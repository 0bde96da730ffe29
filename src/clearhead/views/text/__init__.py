"""Attention in the terminal: every step (`show`), one query in full (`follow`), maps (`heat`)."""

from .follow import follow
from .heat import heat
from .record import to_json
from .show import show

__all__ = [
    "follow",
    "heat",
    "show",
    "to_json",
]
