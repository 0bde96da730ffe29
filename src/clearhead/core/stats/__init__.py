"""Compute exact statistics of attention weights, tile by tile, in O(Tq + Tk) memory.

`statistic` defines what a statistic is. `row_statistics` has statistics of each query, and of its
output, `group_statistics` sums over groups of keys, `weight_statistics` sums over queries, and
`per_key` numbers that multiply weights. `key_scores` computes scores of keys that do not merge.
`parse` reads a request, `sweep` computes it, and `partial` merges shards and chunks. A statistic
with arguments is called by its name in this module:
``stats=["entropy", stats.topk(8), stats.pooled(64, 64)]``.
"""

from .group_statistics import mass, value_weighted, weighted
from .key_scores import key_scores
from .parse import DEFAULT_STATISTICS, lse_alone, parse_stats
from .partial import Partial, finished_lse
from .row_statistics import Varying, topk
from .statistic import Result, Statistic, Statistics, TopWeights, map_tensors
from .sweep import sweep
from .weight_statistics import drop_error, exact_rows, pooled, received

__all__ = [
    "DEFAULT_STATISTICS", "Partial", "Result", "Statistic", "Statistics", "TopWeights", "Varying",
    "drop_error", "exact_rows", "finished_lse", "key_scores", "lse_alone", "map_tensors", "mass",
    "parse_stats", "pooled", "received", "sweep", "topk", "value_weighted", "weighted",
]  # fmt: skip
