"""torch's fused kernels for a GPU, called directly, for plain and causal attention.

`scaled_dot_product_attention` returns no log-sum-exp, and under a causal mask lets masked NaN reach
the output, unless q, k and v are cleaned before. Here the kernels are called below it
(`operator.py`), and a result that is not finite is computed again on the device
(`triton/repair.py`). So this engine needs Triton if the mask hides keys.
"""

from importlib.util import find_spec

from torch import Tensor

from ....errors import how_to_install
from ....problem.problem import Inputs, Problem
from ....stats import Statistics, lse_alone
from ...engine import Engine, Results, policy_of
from ...operators import why_not_operator, with_own_buffers
from ...sdpa_backends import Gpu, backends_decline, gpu_of, hides_nothing, preferred, why_not_direct
from ..interpreter import interprets

INSTALLED = find_spec("triton") is not None
INTERPRETED = Gpu((8, 0))  # the rules that the tests on a CPU follow


class Fused(Engine):
    """torch's fused kernels, with masked NaN repaired, and the log-sum-exp."""

    name = "fused"
    caption = "torch's fused kernels, called directly"

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        if self.name not in policy_of(p.device).engines and not (
            p.device.type == "cpu" and interprets()
        ):
            return ["torch's fused kernels are called directly only on CUDA devices"]
        reasons = [reason] if (reason := why_not_direct(p, _gpu(p))) else []
        if not INSTALLED and not reasons and not hides_nothing(p):
            reasons.append(f"triton, which repairs masked NaN, is missing: {how_to_install('gpu')}")
        return reasons + why_not_operator(p, "torch's fused kernels")

    def caption_of(self, problem: Problem) -> str:
        declined = backends_decline(problem, _gpu(problem), False)
        capable = [name for name in preferred(_gpu(problem)) if not declined[name]]
        repair = "" if hides_nothing(problem) else "; masked NaN is repaired on the device"
        return f"{self.caption}: {' or '.join(capable)}{repair}"

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def returns_lse(self, problem: Problem) -> bool:
        """Do the kernels return the log-sum-exp with the output? Theirs has no gradient."""
        return not problem.records_grad

    @with_own_buffers
    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        from .operator import attend

        return attend(problem, inputs)[0]

    @with_own_buffers
    def answer(self, problem: Problem, inputs: Inputs, statistics: Statistics) -> Results:
        from .operator import attend

        if not (lse_alone(statistics) and self.returns_lse(problem)):
            return super().answer(problem, inputs, statistics)
        out, lse = attend(problem, inputs, lse=True)
        assert lse is not None
        return Results(out, {"lse": lse})


def _gpu(p: Problem) -> Gpu:
    return gpu_of(p.device) if p.device.type == "cuda" else INTERPRETED
