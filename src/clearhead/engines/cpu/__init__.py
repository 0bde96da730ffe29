"""The C++ core: exact attention on a CPU, as `clearhead._kernels` computes it.

What is there and which instructions it uses (`extension`), how a problem becomes a call (`call`),
the way back (`back`), both as operators for whoever traces or differentiates a call (`operator`),
statistics in the same sweep (`look`), and their way back (`look_back`).
"""

import torch
from torch import Tensor

from ...masks.values import shared_offset
from ...problem.biases import Alibi, TensorBias
from ...problem.dropout import FEW
from ...problem.problem import Inputs, Problem
from ...stats import Partial, Statistic, lse_alone
from ...torch_state import compiles_transform, in_forward_mode, is_onnx_export
from ..engine import Engine
from .backward import GRADIENT
from .extension import (
    core,
    false_level as false_level,
    left_to_torch as left_to_torch,
    level,
    status as status,
    use_level as use_level,
)
from .operator import answer
from .pack import DTYPES, RULE, TENSORS, direct
from .stats import MASK, SURVEY, TALLY, answer_and_lse, survey
from .stats_backward import survey_with_gradient

SIZES = TENSORS.size + RULE.size, *(x.size for x in (SURVEY, TALLY, MASK, GRADIENT))
if core is not None and core.struct_sizes() != SIZES:
    raise ImportError(
        "clearhead's compiled core is of another version than its Python code. Both come from one "
        "installation. Install clearhead again: pip install --force-reinstall --no-deps clearhead, "
        "or pip install -e . in a checkout."
    )


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
            reasons.append(false_level())
        if p.device.type not in ("cpu", "meta"):
            reasons.append(f"the C++ core computes on the CPU, not on {p.device}")
        if p.dtype not in DTYPES:
            reasons.append(f"the C++ core computes no {str(p.dtype).removeprefix('torch.')}")
        if in_forward_mode():
            reasons.append("the C++ core carries no forward-mode derivatives")
        if is_onnx_export():
            reasons.append("ONNX has no operator for the C++ core")
        if compiles_transform():
            reasons.append("the C++ core follows no torch.func inside of torch.compile")
        if p.dropout and p.seed is None and _few_weights(p):
            reasons.append("the C++ core drops by a seed; without one torch draws so few weights")
        if isinstance(p.bias, Alibi) and shared_offset(p.bias.align, p.grid) is None:
            reasons.append("the C++ core knows no ALiBi with a position per batch")
        elif isinstance(p.bias, Alibi) and p.grad and p.bias.needs_grad:
            reasons.append("the C++ core has no gradient of ALiBi slopes")
        elif p.bias is not None and not isinstance(p.bias, (Alibi, TensorBias)):
            reasons.append(f"the C++ core does not know {p.bias!r}")
        return reasons

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def run(self, problem: Problem, inputs: Inputs) -> Tensor:
        return answer(problem, inputs, False)[0]

    def look(
        self, problem: Problem, inputs: Inputs, wanted: tuple[Statistic, ...]
    ) -> tuple[Tensor, Partial]:
        if lse_alone(wanted):
            return answer_and_lse(problem, inputs, wanted)
        if problem.dropout or problem.records_grad or not can_count(problem, inputs, wanted):
            return super().look(problem, inputs, wanted)
        out = inputs.q.new_empty((problem.B, problem.H, problem.Tq, problem.Dv))
        return out, survey(problem, inputs, wanted, out)

    def count(self, problem: Problem, inputs: Inputs, wanted: tuple[Statistic, ...]) -> Partial:
        problem = problem.undropped
        if not can_count(problem, inputs, wanted):
            return super().count(problem, inputs, wanted)
        if problem.records_grad:
            return survey_with_gradient(problem, inputs, wanted)
        return survey(problem, inputs, wanted, None)


def _few_weights(p: Problem) -> bool:
    """As few as `nn.Dropout` is to draw. A graph has its own draws, and does not ask for a size."""
    return not torch.compiler.is_compiling() and p.all_pairs <= FEW


def can_count(problem: Problem, inputs: Inputs, wanted: tuple[Statistic, ...]) -> bool:
    """Can the core count this itself? It keeps no tracer's graph. Gradients come from torch, which
    may call another of two nearly equal weights the largest: so the largest are not counted here if
    they are to learn."""
    learned = problem.records_grad and any(s.name == "topk" for s in wanted)
    return direct(problem, inputs) and not learned
