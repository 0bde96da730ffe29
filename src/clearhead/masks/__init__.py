"""Who may see whom. `True` means "may look", everywhere.

A mask is a small immutable rule over positions. Rules compose with `&`, `|` and `~`; a rule prints
its formula and its picture, says `why(q, k)` a pair is allowed or blocked, and exports itself.
Each rule is written twice on purpose, once cell by cell (`keep`) and once as runs of keys (`reach`,
what the engines read); the tests hold the two against each other.
"""

from .compose import And, Not, Or
from .given import Dense, dense, documents
from .mask import Grid, Mask
from .parse import parse
from .positions import (
    Causal,
    Everything,
    causal,
    everything,
    lengths,
    meet,
    prefix,
    window,
)

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
    "lengths",
    "meet",
    "parse",
    "prefix",
    "window",
]
