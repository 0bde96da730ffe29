"""Exact statistics of attention weights, accumulated while streaming, in O(Tq + Tk) memory.

What a statistic is (`statistic`), those of a query (`row_statistics`) and sums of weights over
queries (`weight_statistics`), how they are requested (`parse`), the pass over the tiles (`sweep`),
shards and chunks (`partial`). A statistic with arguments is
called by its name in this module: ``stats=["entropy", stats.topk(8), stats.pooled(64, 64)]``.
"""

from .parse import DEFAULT_STATISTICS, lse_alone, parse_stats
from .partial import Partial
from .row_statistics import mass, topk
from .statistic import Result, Statistic, TopWeights, map_tensors
from .sweep import sweep
from .weight_statistics import exact_rows, pooled

__all__ = [
    "DEFAULT_STATISTICS",
    "Partial",
    "Result",
    "Statistic",
    "TopWeights",
    "exact_rows",
    "lse_alone",
    "map_tensors",
    "mass",
    "parse_stats",
    "pooled",
    "sweep",
    "topk",
]
