"""Exact statistics of attention weights, accumulated tile by tile, in O(Tq + Tk) memory.

A file for each idea: the statistics (`statistics`) and their names (`parse`), the sums they are
computed from and how those merge (`state`), which sums a request needs (`buffers`), the pass over
the tiles (`sweep`), results of shards and chunks that merge (`partial`), and what `look` returns
(`look`). A statistic that takes an argument is called by its name in this module:
``stats=["entropy", stats.topk(8), stats.map(64, 64)]``.
"""

from .look import Look
from .parse import lse_alone, parse_stats
from .partial import Partial
from .state import RowStats, WeightSums
from .statistics import Statistic, Top, map, mass, rows, topk
from .sweep import sweep

__all__ = [
    "Look",
    "Partial",
    "RowStats",
    "Statistic",
    "Top",
    "WeightSums",
    "lse_alone",
    "map",
    "mass",
    "parse_stats",
    "rows",
    "sweep",
    "topk",
]
