"""Make a call with uniform weights, as of a head that looks at all its keys alike."""

from dataclasses import replace

import torch

from ...core.problem.problem import Inputs, Problem


def uniform_call(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """Return a call with uniform weights under the same mask, from queries and keys that are 0.

    It has one head for each mask: H heads if the mask differs between heads, else one.
    """
    H = problem.key_ranges.keys_per_query().shape[1] if problem.masked else 1
    zero = replace(problem, H=H, G=1, D=1, Dv=1, bias=None, softcap=None, sinks=None, dropout=0.0)
    q = torch.zeros_like(inputs.q[:, :1, :, :1]).expand(-1, H, -1, -1)
    k = torch.zeros_like(inputs.k[:, :1, :, :1])
    return zero, Inputs(q, k, k)
