"""Define the operator `clearhead::triton_attend`: the kernels under autograd and tracers.

A second operator, `clearhead::triton_attend_backward`, computes its gradient. Both have a fake
implementation for tracers, and a vmap rule that calls the operator for each example.
`triton_attend` returns the output, the log-sum-exp, and for each row the largest logit and the
factor `share` (forward.py), from which the backward pass recomputes the weights.
"""

from typing import Any

import torch
from torch import Tensor

from ....problem.problem import Inputs, Problem
from ....torch_state import is_plain
from ... import operators
from ..replay import replayed
from .arguments import args_of
from .launch_backward import gradients, seen_by_keys
from .launch_forward import attend

FOR_GRADIENTS = frozenset({"lse", "top", "share"})

# `Library` must outlive its definitions. The C++ core has defined the namespace.
_library = torch.library.Library("clearhead", "FRAGMENT")


def attend_or_record(p: Problem, inputs: Inputs, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the output, and with `lse` the log-sum-exp of every query.

    This calls the kernel directly if all tensors are plain and no gradient is needed, and otherwise
    the operator, or the shorter `recorded_call`.
    """
    rule = args_of(p)
    if is_plain(*inputs, *operators.tensors_of(rule)):
        if not p.grad:
            return _attend_only(*inputs, rule, lse)
        if not lse and operators.is_recordable(p, rule):
            return _RecordedCall.apply(*inputs, rule), None
    out, all_lse, _, _ = _operator.attend(*inputs, *map(operators.savable, rule))
    return out, all_lse if lse else None


# --------------------------------------------------------------------------------- implementations


@replayed
def _attend_only(
    q: Tensor, k: Tensor, v: Tensor, rule: operators.KernelArgs, lse: bool
) -> tuple[Tensor, Tensor | None]:
    out, computed = attend(q, k, v, rule, frozenset({"lse"} if lse else ()))
    assert out is not None
    return out, computed.get("lse")


@replayed
def _attend_for_gradients(
    q: Tensor, k: Tensor, v: Tensor, rule: operators.KernelArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, computed = attend(q, k, v, rule, FOR_GRADIENTS)
    assert out is not None
    return out, computed["lse"], computed["top"], computed["share"]


_repeated_gradients = replayed(gradients)


def _gradients(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, top: Tensor, share: Tensor,
    q: Tensor, k: Tensor, v: Tensor, rule: operators.KernelArgs, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients of q, k, v, bias and sinks."""
    seen = seen_by_keys(q, k, v, rule)
    return _repeated_gradients(
        dout, dlse, out, lse, top, share, q, k, v, rule, bias_grad, seen
    )  # fmt: skip


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H, Tq, _ = q.shape
    sums = (q.new_empty((B, H, Tq), dtype=torch.float32) for _ in range(3))
    return q.new_empty((B, H, Tq, v.shape[3])), *sums  # type: ignore[return-value]


_operator = operators.define_operator(
    _library, "triton_attend", "the Triton engine",
    devices=("CUDA", "CPU"),  # on a CPU by Triton's interpreter
    flags="", outputs="out lse top share", differentiable=2,
    attend=_attend_for_gradients, gradients=_gradients, shapes=_shapes,
)  # fmt: skip

_RecordedCall = operators.recorded_call(_attend_for_gradients, _gradients, _operator.backward)
