"""Exact statistics of attention weights, gathered while streaming, in O(Tq + Tk) memory.

One idea a file: what can be asked (`wanted`, `parse`), the numbers it comes from and how they
merge (`state`), what must be kept of them (`needs`), the pass over the tiles (`gather`), shards and
chunks (`partial`), and what a call gives back (`look`). What takes an argument is asked for by its
name in this module: ``stats=["entropy", stats.topk(8), stats.map(64, 64)]``.
"""

from .gather import gather as gather
from .look import Look as Look
from .parse import parse_stats as parse_stats
from .partial import Partial as Partial
from .state import Rows as Rows, Sums as Sums
from .wanted import (
    Statistic as Statistic,
    Top as Top,
    map as map,
    mass as mass,
    rows as rows,
    topk as topk,
)
