"""Time clearhead, other implementations and the hardware's ceilings in one run.

`cases`, `minilm` and `smollm2` define the cases, `peers` the implementations, `timing` the clock
and the ceilings, and `measure` the run. `gpu` has all of these for a GPU, and `show` the table and
figures.
`bench/LOG.md` is the log of measurements and experiments.
"""

from .gpu import GROUPS as GPU_GROUPS, measure_gpu
from .measure import NAMES, count_results, measure
from .peers import PEERS
from .show import figure, table

__all__ = [
    "GPU_GROUPS",
    "NAMES",
    "PEERS",
    "count_results",
    "figure",
    "measure",
    "measure_gpu",
    "table",
]
