"""clearhead, other implementations and the hardware's ceilings, timed in one run.

The cases (`cases`, `minilm`), the implementations (`peers`), the clock (`timing`), the run
(`measure`), all of these on a GPU (`gpu`), and the table and figures (`show`).
`bench/LOG.md` in the repository records what was measured and tried.
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
