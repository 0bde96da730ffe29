"""Attention in the terminal: every step (`show`), one query in full (`follow`), maps (`heat`)."""

from .follow import follow as follow
from .heat import heat as heat
from .record import to_json as to_json
from .show import show as show
