"""Kernels for a GPU, in Triton (extra `gpu`), which is imported when the engine first computes.

`arguments` defines what the kernels read, and `tile` what they do with a tile. `forward` and
`launch_forward` compute the output and the sums of rows, `backward` and `launch_backward`
gradients. `operator` makes operators of both for autograd and tracers. `weight_sums` and
`statistics` compute statistics. With TRITON_INTERPRET=1 the kernels run on a CPU, slowly; the tests
compare them with the reference in this way.
"""

from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from ....errors import how_to_install
from ....problem.problem import Inputs, Problem
from ....stats import Partial, Result, Statistics, finished_lse, lse_alone
from ...engine import Engine, Results, policy_of
from ...operators import why_not_operator, with_own_buffers
from ...sdpa_backends import gpu_of, why_not_torch, why_slower
from ..interpreter import interprets

INSTALLED = find_spec("triton") is not None
DTYPES = torch.float32, torch.bfloat16, torch.float16
LARGEST_HEAD = 256  # a tile of more would not fit in registers


class Triton(Engine):
    """Exact attention on a GPU, forward and backward, for every mask, with statistics.

    Source: Dao 2023, "FlashAttention-2"; Dao et al. 2023, "Flash-Decoding".
    """

    name = "triton"
    caption = "kernels in Triton that skip what the mask leaves empty"

    def caption_of(self, problem: Problem) -> str:
        parts = [self.caption]
        if problem.device.type == "cuda":
            if problem.dtype == torch.float32:
                tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
                parts.append(f"each product as {'one' if tf32 else 'three'} of tf32")
            gpu = gpu_of(problem.device)
            parts.append(why_not_torch(problem, gpu) or why_slower(problem, gpu))
        return "; ".join(filter(None, parts))

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        reasons = []
        if p.device.type == "cpu" and not interprets():
            return ["the Triton kernels compute on a GPU"]
        if p.device.type != "cpu" and self.name not in policy_of(p.device).engines:
            reasons.append(f"the Triton kernels are for CUDA devices, not {p.device.type}")
        if not INSTALLED:
            reasons.append(f"triton is not installed: {how_to_install('gpu')}")
        elif p.device.type == "cuda" and gpu_of(p.device).capability < (8, 0):
            reasons.append("the Triton kernels need a GPU of compute capability 8.0 or later")
        if p.dtype not in DTYPES:
            reasons.append(f"the Triton kernels do not support {p.dtype_name}")
        if max(p.D, p.Dv) > LARGEST_HEAD:
            reasons.append(f"the Triton kernels support head sizes up to {LARGEST_HEAD}")
        return reasons + why_not_operator(p, "the Triton kernels")

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    @with_own_buffers
    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        from .operator import attend_or_record

        return attend_or_record(problem, inputs, False)[0]

    @with_own_buffers
    def partial(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Partial:
        from .statistics import accumulated, can_count

        if not can_count(problem, inputs, statistics):
            return super().partial(problem, inputs, statistics)
        return accumulated(problem, inputs, statistics)

    @with_own_buffers
    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Statistics
    ) -> dict[str, Result]:
        from .statistics import can_count, finished

        if not can_count(problem, inputs, statistics):
            return super().statistics(problem, inputs, statistics)
        return finished(problem, inputs, statistics, with_out=False)[1]

    @with_own_buffers
    def answer(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Results:
        from .operator import attend_or_record
        from .statistics import can_count, finished

        if can_count(problem, inputs, statistics):
            out, stats = finished(problem, inputs, statistics, with_out=True)
            return Results(cast(Tensor, out), stats)
        if not lse_alone(statistics):
            return super().answer(problem, inputs, statistics)
        out, lse = attend_or_record(problem, inputs, True)
        assert lse is not None
        return Results(out, finished_lse(problem, lse))
