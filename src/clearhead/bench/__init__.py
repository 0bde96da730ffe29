"""clearhead beside its peers and the hardware's own ceilings, timed in one run.

What is asked (`cases`, `minilm`), of whom (`peers`), by which clock (`clock`), the run (`measure`),
and how it is read (`show`). `bench/LOG.md` in the repository keeps what was measured and tried.
"""

from .measure import NAMES as NAMES, how_many as how_many, measure as measure
from .peers import PEERS as PEERS
from .show import figure as figure, table as table
