"""Those who answer, and who counts the weights where nobody asks for an answer."""

from collections.abc import Iterable

from ..problem import Inputs, Problem
from ..stats import Partial, Statistic, gather, parse_stats
from .cpu import Cpu

CORE = Cpu()


def count_weights(problem: Problem, inputs: Inputs, wanted: Iterable[str | Statistic]) -> Partial:
    """Statistics of all queries on all keys, without the output: by the C++ core where it can, else
    by torch, tile by tile (`stats.gather`). Raises what `parse_stats` raises."""
    asked = parse_stats(wanted, problem.grid)
    if CORE.why_not(problem):
        return gather(problem, inputs, asked)
    return CORE.count(problem, inputs, asked)
