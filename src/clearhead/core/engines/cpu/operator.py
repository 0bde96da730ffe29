"""Define the operator `clearhead::attend`: the core under autograd, tracing and torch.func.

A second operator, `clearhead::attend_backward`, computes its gradient, also by the core, from the
output, its rounding error and the log-sum-exp (kernels/generic/backward.h). Both have a fake
implementation for tracers, and a vmap rule that calls the operator for each example.
"""

from typing import Any

import torch
from torch import Tensor

from ...problem.blocks import read_back
from ...problem.problem import Inputs, Problem
from ..operators import KernelArgs, define_operator, recorded_call, savable, with_rows
from .backward import OutputGrads, gradients
from .blocks import decoded
from .call import all_plain, args_of, attend

# `Library` must outlive its definitions.
_library = torch.library.Library("clearhead", "DEF")


def attend_or_record(p: Problem, inputs: Inputs, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the output, and with `lse` the log-sum-exp of every query in float64.

    This calls the core directly if all tensors are plain and no gradient is needed, and otherwise
    the operator.
    """
    if (both := decoded(p, inputs, lse)) is not None:
        return both
    args, inputs = args_of(p), read_back(inputs)
    if not p.grad and all_plain(p, inputs):
        return attend(*inputs, args, lse)[:2]
    if p.grad:
        args = KernelArgs(*map(savable, args))
    if isinstance(args.seed, int):  # a tracer would store a number as a constant of its graph
        args = args._replace(seed=torch.tensor([args.seed], device="cpu"))
    # torch.jit.trace runs a trace again without gradients and compares the outputs, which must be
    # the same in number.
    with_lse = lse or p.grad or torch._C._get_tracing_state() is not None
    out, sums, _ = _operator.attend(*inputs, *args, with_lse)
    return out, sums if lse else None


# --------------------------------------------------------------------------------- implementations


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, args: KernelArgs, lse: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output. With the log-sum-exp, the rounding error is computed too, because a
    gradient needs both."""
    out, sums, rounding = attend(q, k, v, args, lse, lse and _rounds(q))
    return (
        out,
        out.new_empty(0, dtype=torch.float64) if sums is None else sums,
        out.new_empty(0) if rounding is None else rounding,
    )


def _rounds(q: Tensor) -> bool:
    return q.dtype != torch.float32


def _gradients(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rounding: Tensor,
    q: Tensor, k: Tensor, v: Tensor, args: KernelArgs, bias_grad: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of q, k, v, bias and sinks."""
    of = OutputGrads(
        None if dlse is None else dlse.float(),
        dout=with_rows(dout),
        out=with_rows(out),
        rounding=with_rows(rounding) if _rounds(q) else None,
        of_these_keys=True,
    )
    return gradients(q, k, v, args, lse, of, bias_grad)


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, H, Tq, _ = q.shape
    out = q.new_empty((B, H, Tq, v.shape[3]))
    return (
        out,
        q.new_empty((B, H, Tq) if rest[-1] else (0,), dtype=torch.float64),
        torch.empty_like(out) if rest[-1] and _rounds(q) else q.new_empty(0),
    )


_operator = define_operator(
    _library, "attend", "the C++ core",
    devices=("CPU",), flags=", bool lse", outputs="out lse rounding", differentiable=2,
    attend=_outputs, gradients=_gradients, shapes=_shapes,
)  # fmt: skip

RecordedCall = recorded_call(_outputs, _gradients, _operator.backward)
