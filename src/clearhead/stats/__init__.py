"""Exact statistics of attention weights, gathered while streaming, in O(Tq + Tk) memory.

One idea a file: what can be asked (`wanted`, `parse`), the numbers it comes from and how they
merge (`state`), what must be kept of them (`needs`), the pass over the tiles (`sweep`), shards and
chunks (`partial`), and what a call gives back (`look`). What takes an argument is asked for by its
name in this module: ``stats=["entropy", stats.topk(8), stats.map(64, 64)]``.
"""

from .look import Look
from .parse import lse_alone, parse_stats
from .partial import Partial
from .state import Rows, Sums
from .statistics import Statistic, Top, map, mass, rows, topk
from .sweep import sweep

__all__ = [
    "Look",
    "Partial",
    "Rows",
    "Statistic",
    "Sums",
    "Top",
    "lse_alone",
    "map",
    "mass",
    "parse_stats",
    "rows",
    "sweep",
    "topk",
]
