"""`clearhead::attend` as an operator: for whoever traces, transforms or differentiates a call.

Its gradient is a second operator, `clearhead::attend_backward`, which the core answers too, from
the output, what rounding took from it, and the log-sum-exp (kernels/generic/backward.h). Both have shapes
without numbers, for tracers, and a rule for vmap: a call for each example.
"""

from typing import Any

import torch
from torch import Tensor

from ...errors import BadValue
from ...problem.problem import Inputs, Problem
from ...torch_state import has_tangents, in_transform, is_plain, is_unbatched
from .backward import CameBack, gradients
from .pack import Asked, attend, direct, question, rows_of

# SymInt: in a graph for any length, where the queries stand may follow from the length.
QUESTION = (
    "Tensor q, Tensor k, Tensor v, float scale, float softcap, SymInt before, SymInt after, "
    "Tensor? lo, Tensor? hi, Tensor? bits, Tensor? bias, Tensor? slopes, SymInt shift, "
    "Tensor? sinks, float dropout, Tensor? seed"
)
BIAS, SINKS = (3 + Asked._fields.index(name) for name in ("bias", "sinks"))  # places in it

# `Library` must outlive its definitions.
_library = torch.library.Library("clearhead", "DEF")
_library.define(f"attend({QUESTION}, bool lse) -> (Tensor, Tensor, Tensor)")
_library.define(
    "attend_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor rounding, "
    f"{QUESTION}, bool learn_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def answer(p: Problem, inputs: Inputs, lse: bool) -> tuple[Tensor, Tensor | None]:
    """The output, and with `lse` the log-sum-exp of every query, in float64: straight from the core
    where nobody watches, else by the operator."""
    asked = question(p)
    if not p.grad and direct(p, inputs):
        return attend(*inputs, asked, lse)[:2]
    if p.grad:
        asked = Asked(*map(_savable, asked))
    if isinstance(asked.seed, int):  # a number to a tracer would be a constant of its graph
        asked = asked._replace(seed=torch.tensor([asked.seed], device="cpu"))
    # A trace is run again without gradients, and compared.
    keep = lse or p.grad or torch._C._get_tracing_state() is not None
    out, sums, _ = _dispatch(*inputs, *asked, keep)
    return out, sums if lse else None


def _savable(x: Any) -> Any:
    """A mask or a bias made under torch.inference_mode is copied, or it could not be kept for the
    way back."""
    made_there = isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.is_inference()
    return x.clone() if made_there else x


# ------------------------------------------------------------------------------------- the answers


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Whoever asks for the log-sum-exp may want a gradient, so gets what rounding took, too."""
    *asked, lse = rest
    out, sums, rounding = attend(q, k, v, Asked(*asked), lse, lse and _rounds(q))
    return (
        out,
        out.new_empty(0, dtype=torch.float64) if sums is None else sums,
        out.new_empty(0) if rounding is None else rounding,
    )


def _rounds(q: Tensor) -> bool:
    return q.dtype != torch.float32


def _attend_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rounding: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, bias and sinks; empty for a bias not wanted or sinks not there."""
    *given, learn_bias = rest
    asked = Asked(*given)
    came = CameBack(
        None if dlse is None else dlse.float(),
        dout=rows_of(dout),
        out=rows_of(out),
        rounding=rows_of(rounding) if _rounds(q) else None,
    )
    return gradients(q, k, v, asked, lse, came, learn_bias)


_library.impl("attend", _attend, "CPU")
_library.impl("attend_backward", _attend_backward, "CPU")


# ------------------------------------------------------------------------- shapes without numbers


@torch.library.register_fake("clearhead::attend", lib=_library)
def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, H, Tq, _ = q.shape
    out = q.new_empty((B, H, Tq, v.shape[3]))
    return (
        out,
        q.new_empty((B, H, Tq) if rest[-1] else (0,), dtype=torch.float64),
        torch.empty_like(out) if rest[-1] and _rounds(q) else q.new_empty(0),
    )


@torch.library.register_fake("clearhead::attend_backward", lib=_library)
def _backward_shapes(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, rounding: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    q, k, v = rest[:3]
    bias, sinks = rest[BIAS], rest[SINKS]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        bias.new_empty(bias.shape) if rest[-1] else q.new_empty(0, dtype=torch.float32),
        q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape),
    )


# --------------------------------------------------------------------------------------- gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *asks, lse = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.counted = lse
    ctx.tensors = [isinstance(x, Tensor) for x in asks]
    ctx.plain = [None if isinstance(x, Tensor) else x for x in asks]
    ctx.save_for_backward(*output, *(x for x in asks if isinstance(x, Tensor)))


def _back(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    out, lse, rounding, *tensors = ctx.saved_tensors
    given = iter(tensors)
    asks = [
        next(given) if is_tensor else x for is_tensor, x in zip(ctx.tensors, ctx.plain, strict=True)
    ]
    if not ctx.counted:  # a program exported where nothing learned: what it left out is found now
        out, lse, rounding = _dispatch(*asks, True)
    learn_bias = ctx.needs_input_grad[BIAS]
    dq, dk, dv, dbias, dsinks = _dispatch_back(
        torch.zeros_like(out) if dout is None else dout, dlse, out, lse, rounding, *asks, learn_bias
    )
    grads = [None] * (len(asks) + 1)
    grads[:3] = dq, dk, dv
    grads[BIAS] = dbias if learn_bias else None
    grads[SINKS] = None if asks[SINKS] is None else dsinks
    return tuple(grads)


def _no_second(ctx: Any, *gradients: Any) -> None:
    raise BadValue(
        "A gradient of attention is to be differentiated again.",
        "the C++ core has first derivatives.",
        "pass engine='tiled' (or 'steps', for short inputs), which torch differentiates as often "
        "as it is asked to; layers of clearhead.nn have second derivatives in float64.",
    )


torch.library.register_autograd("clearhead::attend", _back, setup_context=_keep, lib=_library)
torch.library.register_autograd("clearhead::attend_backward", _no_second, lib=_library)


# ------------------------------------------------------------------ who is asked, and torch.func


def _dispatch(*arguments: Any) -> Any:
    if in_transform():
        return Attend.apply(*arguments)
    if is_plain(*_tensors(arguments)):
        return Learn.apply(*arguments)
    return torch.ops.clearhead.attend(*arguments)


def _dispatch_back(*arguments: Any) -> Any:
    if in_transform():
        return AttendBackward.apply(*arguments)
    tensors = _tensors(arguments)
    if has_tangents(*tensors):
        raise BadValue(
            "A gradient of attention is asked for derivatives in forward mode.",
            "the C++ core carries none along, on the way back neither.",
            "pass engine='tiled', which torch differentiates in every mode.",
        )
    if not torch.is_grad_enabled() and is_unbatched(*tensors):
        return _attend_backward(*arguments)
    return torch.ops.clearhead.attend_backward(*arguments)


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


class Learn(torch.autograd.Function):
    """The operator where only autograd follows the call, without the way through torch.library,
    which takes longer than a small call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = _attend(*arguments)
        _keep(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _back(ctx, *grads)


def _one_by_one(
    ask: Any, info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """vmap: a call for each example, then stacked. Of no example, one of zeros shows the shapes."""
    count = info.batch_size
    pairs = [
        (x if count or dim is None else x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]]), dim)
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    answers = [
        ask(*(x if dim is None else x.select(dim, i) for x, dim in pairs))
        for i in range(max(count, 1))
    ]
    together = tuple(torch.stack(parts)[:count] for parts in zip(*answers, strict=True))
    return together, (0,) * len(together)


class Attend(torch.autograd.Function):
    """The operator under torch.func, which does not take gradients from where torch.library keeps
    them."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.clearhead.attend(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _back(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _one_by_one(_dispatch, info, in_dims, arguments)


class AttendBackward(torch.autograd.Function):
    """Its gradient, likewise."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.clearhead.attend_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _no_second(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _one_by_one(_dispatch_back, info, in_dims, arguments)


torch.library.register_vmap(
    "clearhead::attend",
    lambda info, in_dims, *arguments: _one_by_one(_dispatch, info, in_dims, arguments),
    lib=_library,
)
torch.library.register_vmap(
    "clearhead::attend_backward",
    lambda info, in_dims, *arguments: _one_by_one(_dispatch_back, info, in_dims, arguments),
    lib=_library,
)
