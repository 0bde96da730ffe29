"""Who may see whom. `True` means "may look", everywhere.

A mask is a small immutable rule over positions. Rules compose with `&`, `|` and `~`; a rule prints
its formula and its picture, says `why(q, k)` a pair is allowed or blocked, and exports itself.
Each rule is written twice on purpose, once cell by cell (`keep`) and once as runs of keys (`reach`,
what the engines read); the tests hold the two against each other.
"""

from .given import Dense as Dense, dense as dense, documents as documents
from .mask import And as And, Grid as Grid, Mask as Mask, Not as Not, Or as Or
from .parse import parse as parse
from .positions import (
    Causal as Causal,
    Everything as Everything,
    causal as causal,
    everything as everything,
    lengths as lengths,
    prefix as prefix,
    window as window,
)
