"""Define which query may look at which key. `True` means "may look", everywhere.

A mask is a small immutable rule over positions. Masks compose with `&`, `|` and `~`. A mask prints
its formula and its picture, explains with `why(q, k)` why a pair is allowed or blocked, and exports
itself to other formats. Each rule is written twice on purpose: cell by cell (`allowed`), and as
ranges of keys per query (`key_ranges`), which the engines read. The tests compare the two.
"""

from .data import Dense, dense, documents
from .grid import Grid
from .key_group import duplicate_keys, induction_keys
from .mask import And, Mask, Not, Or
from .parse import parse
from .positions import Causal, Everything, causal, everything, intersect, lengths, prefix, window

__all__ = [
    "And", "Causal", "Dense", "Everything", "Grid", "Mask", "Not", "Or", "causal", "dense",
    "documents", "duplicate_keys", "everything", "induction_keys", "intersect", "lengths", "parse",
    "prefix", "window",
]  # fmt: skip
