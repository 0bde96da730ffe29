"""clearhead beside its peers and the hardware's own ceilings, timed in one run.

What is asked (`cases`, `minilm`), of whom (`peers`), by which clock (`clock`), the run (`measure`),
and how it is read (`show`). `bench/LOG.md` in the repository keeps what was measured and tried.
"""

from .measure import NAMES, how_many, measure
from .peers import PEERS
from .show import figure, table

__all__ = [
    "NAMES",
    "PEERS",
    "figure",
    "how_many",
    "measure",
    "table",
]
