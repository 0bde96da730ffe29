"""Define the operator `clearhead::attend`: the core under autograd, tracing and torch.func.

A second operator, `clearhead::attend_backward`, computes its gradient, also by the core, from the
output, its rounding error and the log-sum-exp (kernels/generic/backward.h). Both have a fake
implementation for tracers, and a vmap rule that calls the operator for each example.
"""

from typing import Any

import torch
from torch import Tensor

from ...problem.problem import Inputs, Problem
from ..operators import (  # fmt: skip
    BIAS,
    KernelArgs,
    define_operator,
    gradients_by_argument,
    recorded_call,
    savable,
    save,
    saved,
    with_own_buffers,
    with_rows,
)
from .backward import OutputGrads, gradients
from .call import all_plain, args_of, attend

# `Library` must outlive its definitions.
_library = torch.library.Library("clearhead", "DEF")


def attend_or_record(p: Problem, inputs: Inputs, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the output, and with `lse` the log-sum-exp of every query in float64.

    This calls the core directly if all tensors are plain and no gradient is needed, and otherwise
    the operator.
    """
    args = args_of(p)
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


@with_own_buffers
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output. With the log-sum-exp, the rounding error is computed too, because a
    gradient needs both."""
    *args, lse = rest
    return _outputs(q, k, v, KernelArgs(*args), lse)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, args: KernelArgs, lse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out, sums, rounding = attend(q, k, v, args, lse, lse and _rounds(q))
    return (
        out,
        out.new_empty(0, dtype=torch.float64) if sums is None else sums,
        out.new_empty(0) if rounding is None else rounding,
    )


def _rounds(q: Tensor) -> bool:
    return q.dtype != torch.float32


@with_own_buffers
def _attend_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rounding: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k, v, bias and sinks (`gradients`)."""
    *args, bias_grad = rest
    of = OutputGrads(
        None if dlse is None else dlse.float(),
        dout=with_rows(dout),
        out=with_rows(out),
        rounding=with_rows(rounding) if _rounds(q) else None,
        of_these_keys=True,
    )
    grads = gradients(q, k, v, KernelArgs(*args), lse, of, bias_grad)
    dq, dk, dv, dbias, dsinks = (
        q.new_empty(0, dtype=torch.float32) if x is None else x for x in grads
    )
    return dq, dk, dv, dbias, dsinks


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, H, Tq, _ = q.shape
    out = q.new_empty((B, H, Tq, v.shape[3]))
    return (
        out,
        q.new_empty((B, H, Tq) if rest[-1] else (0,), dtype=torch.float64),
        torch.empty_like(out) if rest[-1] and _rounds(q) else q.new_empty(0),
    )


# --------------------------------------------------------------------------------------- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *args, lse = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.has_lse = lse
    save(ctx, args, output)


@with_own_buffers
def _back(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    (out, lse, rounding), args = saved(ctx, 3)
    if not ctx.has_lse:  # a graph exported without gradients
        out, lse, rounding = _operator.attend(*args, True)
    dout = torch.zeros_like(out) if dout is None else dout
    bias_grad = ctx.needs_input_grad[BIAS]
    grads = _operator.backward(dout, dlse, out, lse, rounding, *args, bias_grad)
    return *gradients_by_argument(grads, args, bias_grad), None


_operator = define_operator(
    _library, "attend", "the C++ core",
    devices=("CPU",), flags=", bool lse", outputs="out lse rounding",
    attend=_attend, attend_backward=_attend_backward, shapes=_shapes, save=_save, back=_back,
)  # fmt: skip


def _plain_gradients(
    dout: Tensor, out: Tensor, lse: Tensor, rounding: Tensor, q: Tensor, k: Tensor, v: Tensor,
    args: KernelArgs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    correction = rounding if _rounds(q) else None
    of = OutputGrads(None, None, None, with_rows(dout), out, correction, True)
    return gradients(q, k, v, args, lse, of, False)


RecordedCall = recorded_call(
    lambda q, k, v, args: _outputs(q, k, v, args, True), _plain_gradients, _operator.backward
)
