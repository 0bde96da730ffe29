"""Compute exact attention on a CPU by the C++ core, `clearhead._kernels`.

`extension` loads the compiled module and its instruction sets, and `call` calls it with a problem.
`backward` computes gradients; `operator` makes operators of both for autograd and tracers. `stats`
computes statistics in the same sweep, and `stats_backward` their gradients. `direct` checks plain
calls quickly.
"""

import torch

from ...problem.dropout import FEW_WEIGHTS
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Statistic, lse_alone
from ..devices import policy_of
from ..engine import Answer, Engine, Results
from ..operators import in_kernels, why_not_operator, with_own_buffers
from .call import DTYPES, all_plain, args_of
from .extension import (
    amx_note as amx_note,
    core,
    level,
    level_error as level_error,
    status as status,
    use_level as use_level,
)
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
            dtype = str(p.dtype).removeprefix("torch.")
            reasons.append(f"the C++ core does not support {dtype}")
        if p.dropout and p.seed is None and _few_weights(p):
            reasons.append("for so few weights, dropout without a seed uses torch's generator")
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
        computed = attend_or_record(problem, inputs, False)[0] if output else None
        problem = problem.without_dropout
        if not (statistics and can_count(problem, inputs, statistics)):
            return Answer(computed, super().answer(problem, inputs, statistics, output=False).stats)
        if problem.records_grad:
            return Answer(computed, core_stats_with_grad(problem, inputs, statistics))
        return Answer(computed, core_stats(problem, inputs, statistics)[0])

    @with_own_buffers
    def results(
        self,
        problem: Problem,
        inputs: Inputs,
        statistics: tuple[Statistic, ...] = (),
        *,
        output: bool = True,
    ) -> Results:
        undropped = problem.without_dropout
        if not statistics or problem.records_grad or not can_count(undropped, inputs, statistics):
            return super().results(problem, inputs, statistics, output=output)
        if output and lse_alone(statistics):  # as a compiled call
            decoded, lse = attend_or_record(problem, inputs, True)
            assert lse is not None
            return Results(decoded, {"lse": lse.to(problem.wide)})
        p, together = undropped, output and not problem.dropout
        computed = core_results(p, readable(inputs, together), args_of(p), statistics, together)
        if output and problem.dropout:
            return Results(attend_or_record(problem, inputs, False)[0], computed.stats)
        return computed


def _few_weights(p: Problem) -> bool:
    """Return whether dropout without a seed is drawn as `nn.Dropout` draws it. It is not in a
    compiled graph, which does not depend on the sizes."""
    return not torch.compiler.is_compiling() and p.all_pairs <= FEW_WEIGHTS


def can_count(problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> bool:
    """Return whether the core can compute these statistics.

    It cannot under a tracer or a transform. It cannot compute `topk` with gradients, because torch
    computes the gradient, and may select another of two nearly equal weights.
    """
    topk_grad = problem.records_grad and any(s.name == "topk" for s in statistics)
    return all_plain(problem, inputs) and all(map(in_kernels, statistics)) and not topk_grad
