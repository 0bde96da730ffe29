"""The C++ core: exact attention on a CPU, as `clearhead._kernels` computes it.

The compiled module and its instruction sets (`extension`), how a problem becomes a call (`pack`),
gradients (`backward`), both as operators for autograd and tracers (`operator`), statistics in the
same sweep (`stats`), and their gradients (`stats_backward`).
"""

import torch

from ...problem.dropout import FEW_WEIGHTS
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Statistic, lse_alone
from ..engine import Answer, Engine
from ..operators import in_kernels, why_not_operator, with_own_buffers
from .extension import (
    amx_note as amx_note,
    core,
    level,
    level_error as level_error,
    status as status,
    use_level as use_level,
)
from .operator import attend_or_record
from .pack import DTYPES, all_plain
from .stats import core_stats
from .stats_backward import core_stats_with_grad


class Cpu(Engine):
    """The compiled core, in prefill and decode of its own (kernels/attention.h).

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
        if p.device.type not in ("cpu", "meta"):
            reasons.append(f"the C++ core computes on the CPU, not on {p.device}")
        if p.dtype not in DTYPES:
            reasons.append(f"the C++ core computes no {str(p.dtype).removeprefix('torch.')}")
        if p.dropout and p.seed is None and _few_weights(p):
            reasons.append("the C++ core drops by a seed; without one torch draws so few weights")
        return reasons + why_not_operator(p, "the C++ core")

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    @with_own_buffers
    def answer(
        self,
        problem: Problem,
        inputs: Inputs,
        statistics: tuple[Statistic, ...] = (),
        *,
        output: bool = True,
    ) -> Answer:
        if output and statistics and lse_alone(statistics):
            out, lse = attend_or_record(problem, inputs, True)
            assert lse is not None
            return Answer(out, Partial.of_lse(problem, statistics, lse))
        counts = bool(statistics) and can_count(problem.without_dropout, inputs, statistics)
        if output and counts and not problem.dropout and not problem.records_grad:
            out = inputs.q.new_empty((problem.B, problem.H, problem.Tq, problem.Dv))
            return Answer(out, core_stats(problem, inputs, statistics, out))
        computed = attend_or_record(problem, inputs, False)[0] if output else None
        if not counts:
            return Answer(computed, super().answer(problem, inputs, statistics, output=False).stats)
        problem = problem.without_dropout
        if problem.records_grad:
            return Answer(computed, core_stats_with_grad(problem, inputs, statistics))
        return Answer(computed, core_stats(problem, inputs, statistics, None))


def _few_weights(p: Problem) -> bool:
    """Few enough that torch draws as `nn.Dropout` does. A graph does not depend on the sizes."""
    return not torch.compiler.is_compiling() and p.all_pairs <= FEW_WEIGHTS


def can_count(problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> bool:
    """Can the core compute these statistics? Not under a tracer or transform. The gradient of topk
    comes from torch, which may consider another of two nearly equal weights the largest: so with
    gradients the core does not compute it."""
    topk_grad = problem.records_grad and any(s.name == "topk" for s in statistics)
    return all_plain(problem, inputs) and all(map(in_kernels, statistics)) and not topk_grad
