"""Kernels for a GPU, in Triton (extra `gpu`), which is imported when the engine first answers.

What the kernels read (`arguments`), what they do with a tile (`tile`), the output and the sums of
rows (`forward`, `launch_forward`), gradients (`backward`, `launch_backward`), both as operators for
autograd and tracers (`operator`), statistics (`weight_sums`, `statistics`). With TRITON_INTERPRET=1
the same kernels run on a CPU, slowly: so the tests hold them against the reference where there is
no GPU.
"""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from ...errors import how_to_install
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Statistic, lse_alone
from ..engine import Engine
from ..operators import why_not_operator
from ..sdpa_backends import gpu_of, why_not_torch

INSTALLED = find_spec("triton") is not None
DTYPES = torch.float32, torch.bfloat16, torch.float16
LARGEST_HEAD = 256  # a tile of more would not fit in registers


class Triton(Engine):
    """Exact attention on a GPU, forward and back, for every mask, and statistics in the sweep.

    Source: Dao 2023, "FlashAttention-2"; Dao et al. 2023, "Flash-Decoding".
    """

    name = "triton"
    caption = "kernels in Triton that skip what the mask leaves empty"
    atomic = False  # gradients: added up in a fixed order

    def caption_of(self, problem: Problem) -> str:
        on_gpu = problem.device.type == "cuda"
        reason = why_not_torch(problem, gpu_of(problem.device)) if on_gpu else ""
        return f"{self.caption}; {reason}" if reason else self.caption

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        reasons = []
        if p.device.type == "cpu" and not _interprets():
            return ["the Triton kernels compute on a GPU"]
        if p.device.type not in ("cpu", "cuda", "meta"):
            reasons.append(f"the Triton kernels are for CUDA devices, not {p.device.type}")
        if not INSTALLED:
            reasons.append(f"triton is not installed: {how_to_install('gpu')}")
        elif p.device.type == "cuda" and gpu_of(p.device).capability < (8, 0):
            reasons.append("the Triton kernels need a GPU of compute capability 8.0 or later")
        if p.dtype not in DTYPES:
            reasons.append(f"the Triton kernels compute no {str(p.dtype).removeprefix('torch.')}")
        if max(p.D, p.Dv) > LARGEST_HEAD:
            reasons.append(f"the Triton kernels hold heads of up to {LARGEST_HEAD}")
        return reasons + why_not_operator(p, "the Triton kernels")

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def run(self, problem: Problem, inputs: Inputs) -> Tensor:
        from .operator import answer

        return answer(problem, inputs, False, self.atomic)[0]

    def look(
        self, problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
    ) -> tuple[Tensor, Partial]:
        from .operator import answer
        from .statistics import answer_and_stats, can_count

        if lse_alone(statistics):
            out, lse = answer(problem, inputs, True, self.atomic)
            assert lse is not None
            return out, Partial.of_lse(problem, statistics, lse)
        if not can_count(problem, inputs, statistics):
            return super().look(problem, inputs, statistics)
        counted, partial = answer_and_stats(problem, inputs, statistics, True)
        assert counted is not None
        return counted, partial

    def count(self, problem: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> Partial:
        from .statistics import answer_and_stats, can_count

        if not can_count(problem, inputs, statistics):
            return super().count(problem, inputs, statistics)
        return answer_and_stats(problem.without_dropout, inputs, statistics, False)[1]


class TritonAtomic(Triton):
    """The same output and statistics; gradients with five products a tile instead of seven, whose
    last digits differ from run to run."""

    name = "triton-atomic"
    caption = f"{Triton.caption}; gradients in no fixed order"
    atomic = True

    def why_not(self, problem: Problem) -> list[str]:
        reasons = super().why_not(problem)
        if problem.grad and torch.are_deterministic_algorithms_enabled():
            reasons.append(
                "its gradients are added up in no fixed order, and "
                "torch.use_deterministic_algorithms is on"
            )
        return reasons


def _interprets() -> bool:
    """Does Triton run its kernels on a CPU? It reads this once, when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
