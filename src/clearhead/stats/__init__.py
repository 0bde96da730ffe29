"""Exact statistics of attention weights, accumulated while streaming, in O(Tq + Tk) memory.

What a statistic is (`statistic`), those of a query (`row_statistics`), sums over groups of keys
(`group_statistics`) and sums of weights over queries (`weight_statistics`), a number for every key
(`per_key`), how statistics are requested (`parse`), the pass over the tiles (`sweep`), shards and
chunks (`partial`). A statistic with arguments is called by its name in this module:
``stats=["entropy", stats.topk(8), stats.pooled(64, 64)]``.
"""

from .group_statistics import mass, value_weighted, weighted
from .parse import DEFAULT_STATISTICS, lse_alone, parse_stats
from .partial import Partial
from .row_statistics import topk
from .statistic import Result, Statistic, TopWeights, map_tensors
from .sweep import sweep
from .weight_statistics import exact_rows, pooled, received

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
    "received",
    "sweep",
    "topk",
    "value_weighted",
    "weighted",
]
