"""Who may look at whom. `True` means "may look", everywhere.

A mask is a small immutable rule over positions. Masks compose with `&`, `|` and `~`; a mask prints
its formula and its picture, says `why(q, k)` a pair is allowed or blocked, and exports itself.
Each rule is written twice on purpose, once cell by cell (`allowed`) and once as ranges of keys per
query (`key_ranges`, what the engines read); the tests compare the two.
"""

from .data import Dense, dense, documents
from .grid import Grid
from .mask import And, Mask, Not, Or
from .parse import parse
from .positions import Causal, Everything, causal, everything, intersect, lengths, prefix, window

__all__ = [
    "And",
    "Causal",
    "Dense",
    "Everything",
    "Grid",
    "Mask",
    "Not",
    "Or",
    "causal",
    "dense",
    "documents",
    "everything",
    "intersect",
    "lengths",
    "parse",
    "prefix",
    "window",
]
