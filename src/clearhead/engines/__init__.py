"""Those who answer, and who counts the weights where nobody asks for an answer."""

from collections.abc import Iterable

from ..problem import Inputs, Problem
from ..stats import Partial, Statistic, parse_stats
from .cpu import Cpu
from .engine import Engine
from .tiled import Tiled

COUNTERS: tuple[Engine, ...] = (Cpu(), Tiled())


def count(problem: Problem, inputs: Inputs, wanted: Iterable[str | Statistic]) -> Partial:
    """Statistics of all queries on all keys, without the output: by the C++ core where it can, else
    by torch, tile by tile (`stats.gather`). Raises what `parse_stats` raises."""
    asked = parse_stats(wanted, problem.grid)
    counter = next((c for c in COUNTERS if not c.why_not(problem)), COUNTERS[-1])
    return counter.count(problem, inputs, asked)
