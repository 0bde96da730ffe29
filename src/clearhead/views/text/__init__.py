"""Show attention in a terminal: every step (`show`), one query (`follow`), maps (`heat`)."""

from .as_json import to_json
from .follow import follow
from .heat import heat
from .show import show

__all__ = ["follow", "heat", "show", "to_json"]
