"""Compute exact attention on a CPU by the C++ core, `clearhead._kernels`.

`extension` loads the compiled module and its instruction sets, and `call` calls it with a problem.
`backward` computes gradients; `operator` makes operators of both for autograd and tracers. `stats`
computes statistics in the same sweep, and `stats_backward` their gradients. `direct` checks plain
calls quickly.
"""

from typing import cast

import torch
from torch import Tensor

from ...problem.blocks import read_back
from ...problem.dropout import FEW_WEIGHTS
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Result, Statistics, finished_lse, lse_alone
from ..engine import Engine, Results, policy_of
from ..operators import in_kernels, why_not_operator, with_own_buffers
from .call import DTYPES, all_plain, args_of
from .extension import core, level, level_error, status
from .operator import attend_or_record
from .stats import core_results, core_stats, readable
from .stats_backward import core_stats_with_grad


class Cpu(Engine):
    """The compiled core, with a kernel for prefill and one for decode (kernels/attention.h).

    Source: Dao et al. 2022, "FlashAttention"; Dao et al. 2023, "Flash-Decoding".
    """

    name = "cpu"

    @property
    def caption(self) -> str:
        return f"the C++ core, {status()}" if core is not None else status()

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        if core is None:
            return [status()]
        reasons = []
        if not level():
            reasons.append(level_error())
        if self.name not in policy_of(p.device).engines:
            reasons.append(f"the C++ core computes on the CPU, not on {p.device}")
        if p.dtype not in DTYPES:
            reasons.append(f"the C++ core does not support {p.dtype_name}")
        # A compiled graph does not depend on the sizes.
        is_drawn = p.dropout and p.seed is None and not torch.compiler.is_compiling()
        if is_drawn and p.all_pairs <= FEW_WEIGHTS:  # as `nn.Dropout` draws it
            reasons.append("for so few weights, dropout without a seed uses torch's generator")
        return reasons + why_not_operator(p, "the C++ core")

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    @with_own_buffers
    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        return attend_or_record(problem, inputs, False)[0]

    @with_own_buffers
    def partial(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Partial:
        inputs = read_back(inputs)
        if not can_count(problem, inputs, statistics):
            return super().partial(problem, inputs, statistics)
        if problem.records_grad:
            return core_stats_with_grad(problem, inputs, statistics)
        return core_stats(problem, inputs, statistics)[0]

    @with_own_buffers
    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Statistics
    ) -> dict[str, Result]:
        inputs = read_back(inputs)
        if problem.records_grad or not can_count(problem, inputs, statistics):
            return super().statistics(problem, inputs, statistics)
        p, tensors = problem, readable(inputs, False)
        return core_results(p, tensors, args_of(p), statistics, False)[1]

    @with_own_buffers
    def answer(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Results:
        if lse_alone(statistics):
            out, lse = attend_or_record(problem, inputs, True)
            assert lse is not None
            return Results(out, finished_lse(problem, lse))
        p, apart = problem, problem.dropout or problem.records_grad
        if apart or not can_count(p, inputs, statistics):
            return super().answer(p, inputs, statistics)
        both, stats = core_results(p, readable(inputs, True), args_of(p), statistics, True)
        return Results(cast(Tensor, both), stats)


def can_count(problem: Problem, inputs: Inputs, statistics: Statistics) -> bool:
    """Return whether the core can compute these statistics.

    It cannot under a tracer or a transform. It cannot compute `topk` with gradients, because torch
    computes the gradient, and may select another of two nearly equal weights.
    """
    topk_grad = problem.records_grad and any(s.name == "topk" for s in statistics)
    return all_plain(problem, inputs) and all(map(in_kernels, statistics)) and not topk_grad
