"""Compute the statistics of uniform weights under the mask of a call.

They show what a head would do that looks at all its keys alike, and how many keys a query has.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.functional.sharding import statistics_of
from ..core.problem.problem import Inputs, Problem
from ..core.stats import Result, Statistic, Varying


def uniform_results(
    problem: Problem, inputs: Inputs, statistics: Sequence[Statistic]
) -> tuple[dict[str, Result], Tensor]:
    """Return the statistics of one head with uniform weights, without those of values.

    Also return the number of keys that each query may look at, (B|1, 1, T). Raises `BadValue` for a
    mask that differs between heads.
    """
    allowed = torch.full((1, 1, problem.Tq), problem.Tk)
    if problem.masked:
        allowed = problem.key_ranges.keys_per_query()
    if allowed.shape[1] > 1:
        raise BadValue(
            "The heads of a layer have different masks.",
            "a survey takes the mean of all heads of a layer over the same queries.",
            "survey the heads of each mask separately.",
        )
    one = replace(problem, H=1, G=1, D=1, Dv=1, bias=None, softcap=None, sinks=None, dropout=0.0)
    q, k = (torch.zeros_like(x[:, :1, :, :1]) for x in (inputs.q, inputs.k))
    weights_only = [s for s in statistics if s.factors is None and not isinstance(s, Varying)]
    return statistics_of(one, Inputs(q, k, k), weights_only), allowed
