"""The operator `clearhead::triton_attend`: the kernels under autograd, tracers and torch.compile.

Its gradient is a second operator, `clearhead::triton_attend_backward`. Both have a fake
implementation for tracers, and a rule for vmap: a call for each example. `triton_attend` returns
the output, the log-sum-exp, and per row the largest logit and the share of a weight (forward.py),
from which the backward pass computes the weights again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import BadValue
from ...problem.problem import Inputs, Problem
from ...torch_state import in_transform, is_plain, is_unbatched
from ..operators import (
    BIAS,
    SIGNATURE,
    KernelArgs,
    eager,
    gradient_shapes,
    in_their_places,
    one_by_one,
    savable,
    save,
    saved,
    tensors_of,
)  # fmt: skip
from .arguments import args_of
from .gradients import gradients
from .launch import attend

FOR_GRADIENTS = frozenset({"lse", "max", "share"})

# `Library` must outlive its definitions. The C++ core has defined the namespace.
_library = torch.library.Library("clearhead", "FRAGMENT")
_library.define(f"triton_attend({SIGNATURE}, bool atomic) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "triton_attend_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor top, "
    f"Tensor share, {SIGNATURE}, bool atomic, bool bias_grad) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def answer(p: Problem, inputs: Inputs, lse: bool, atomic: bool) -> tuple[Tensor, Tensor | None]:
    """The output, and with `lse` the log-sum-exp of every query: directly by the kernel where
    nothing is recorded, else by the operator. `atomic` is for its gradient (gradients.py)."""
    rule = args_of(p)
    if not p.grad and is_plain(*inputs, *tensors_of(rule)):
        out, found, _ = attend(*inputs, rule, frozenset({"lse"} if lse else ()))
        assert out is not None
        return out, found.get("lse")
    out, sums, _, _ = _dispatch(*inputs, *map(savable, rule), atomic)
    return out, sums if lse else None


# --------------------------------------------------------------------------------- implementations


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *rule, _ = rest
    out, found, splits = attend(q, k, v, KernelArgs(*rule), FOR_GRADIENTS)
    assert out is not None
    top = found["max"]
    # The largest over all splits; one split is all of them.
    return out, found["lse"], top[0] if splits == 1 else _largest(top), found["share"]


def _largest(top: Tensor) -> Tensor:
    return top.amax(0)


def _attend_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, top: Tensor, share: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias and sinks; empty without `bias_grad`, and without sinks."""
    *rule, atomic, bias_grad = rest
    return gradients(
        dout, dlse, out, lse, top, share, q, k, v, KernelArgs(*rule), atomic, bias_grad
    )


for _device in ("CUDA", "CPU"):  # on a CPU by Triton's interpreter
    _library.impl("triton_attend", _attend, _device)
    _library.impl("triton_attend_backward", _attend_backward, _device)


# --------------------------------------------------------------------------- fake implementations


@torch.library.register_fake("clearhead::triton_attend", lib=_library)
def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H, Tq, _ = q.shape
    sums = (q.new_empty((B, H, Tq), dtype=torch.float32) for _ in range(3))
    return q.new_empty((B, H, Tq, v.shape[3])), *sums  # type: ignore[return-value]


@torch.library.register_fake("clearhead::triton_attend_backward", lib=_library)
def _backward_shapes(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, top: Tensor, share: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    *arguments, bias_grad = rest
    return gradient_shapes(arguments, bias_grad)


# --------------------------------------------------------------------------------------- gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[2:])
    save(ctx, inputs, output)


def _back(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    (out, lse, top, share), args = saved(ctx, 4)
    dout = torch.zeros_like(out) if dout is None else dout
    bias_grad = ctx.needs_input_grad[BIAS]
    grads = _dispatch_back(dout, dlse, out, lse, top, share, *args, bias_grad)
    return tuple(in_their_places(grads, args, bias_grad))


def _no_second(ctx: Any, *gradients: Any) -> None:
    raise BadValue(
        "A gradient of attention is to be differentiated again.",
        "the Triton engine has first derivatives.",
        "pass engine='tiled' (or 'steps', for short inputs), which torch differentiates any number "
        "of times.",
    )


torch.library.register_autograd(
    "clearhead::triton_attend", _back, setup_context=_save, lib=_library
)
torch.library.register_autograd("clearhead::triton_attend_backward", _no_second, lib=_library)


# ------------------------------------------------------------------------ dispatch, and torch.func


def _dispatch(*arguments: Any) -> Any:
    if in_transform():
        return Attend.apply(*arguments)
    if is_plain(*tensors_of(arguments)):
        return Eager.apply(*arguments)
    return torch.ops.clearhead.triton_attend(*arguments)


def _dispatch_back(*arguments: Any) -> Any:
    if in_transform():
        return AttendBackward.apply(*arguments)
    if not torch.is_grad_enabled() and is_unbatched(*tensors_of(arguments)):
        return _attend_backward(*arguments)
    return torch.ops.clearhead.triton_attend_backward(*arguments)


attend_one_by_one = partial(one_by_one, _dispatch)
backward_one_by_one = partial(one_by_one, _dispatch_back)
torch.library.register_vmap("clearhead::triton_attend", attend_one_by_one, lib=_library)
torch.library.register_vmap("clearhead::triton_attend_backward", backward_one_by_one, lib=_library)


# Eager calls take `Eager`, for the time of the host; torch.func refuses an operator's own autograd,
# which has no `setup_context` (cpu/operator.py).


Eager = eager(_attend, _save, _back)


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.clearhead.triton_attend(*arguments)

    setup_context = staticmethod(_save)
    backward = staticmethod(_back)
    vmap = staticmethod(attend_one_by_one)


class AttendBackward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.clearhead.triton_attend_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_no_second)
    vmap = staticmethod(backward_one_by_one)
