"""What the operators of the C++ core and of the Triton kernels share.

What they cannot answer, which statistics they hold, their arguments, what autograd saves of a call,
the shapes of gradients, vmap, and how all of these are registered.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import BadValue
from ..masks.key_ranges import UNLIMITED
from ..masks.values import shared_offset
from ..problem.biases import Alibi, TensorBias
from ..problem.problem import Problem
from ..stats import Statistic
from ..stats.statistic import RowStatistic
from ..torch_state import (
    compiles_transform,
    has_tangents,
    in_forward_mode,
    in_functionalize,
    in_transform,
    is_functionalized,
    is_onnx_export,
    is_plain,
    is_unbatched,
    sees_functions,
)

Function = TypeVar("Function", bound=Callable[..., Any])

# SymInt: in a graph for any length, the positions of the queries may depend on the length.
SIGNATURE = (
    "Tensor q, Tensor k, Tensor v, float scale, float softcap, SymInt before, SymInt after, "
    "Tensor? lo, Tensor? hi, Tensor? bits, Tensor? bias, Tensor? slopes, SymInt shift, "
    "Tensor? sinks, float dropout, Tensor? seed"
)


class KernelArgs(NamedTuple):
    """The arguments besides q, k and v. Query q sees the keys q - before to q + after, or, with
    `lo`, those of its key ranges where `bits` are set; `slopes` and `shift` are ALiBi's."""

    scale: float
    softcap: float  # 0 means none
    before: int
    after: int
    lo: Tensor | None = None
    hi: Tensor | None = None
    bits: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    shift: int = 0
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None


def kernel_args(p: Problem, seed: int | Tensor | None) -> KernelArgs:
    """The arguments that stand for the mask, the bias, the sinks and the dropout of a problem."""
    before = after = UNLIMITED
    lo = hi = bits = bias = slopes = sinks = None
    shift = 0
    if p.masked:
        # A band of two numbers needs no tensors, which are most of the cost of a small call.
        if (band := p.mask.band(p.grid)) is not None:
            before, after = band
        else:
            lo, hi, bits = p.key_ranges.lo, p.key_ranges.hi, p.key_ranges.bits
    if isinstance(p.bias, TensorBias):
        bias = p.bias.as_4d().resolve_neg()
    elif isinstance(p.bias, Alibi):
        slopes = p.bias.of(p.grid, p.device, torch.float32).resolve_neg()
        shift = shared_offset(p.bias.align, p.grid) or 0  # a position per batch is declined
    if p.sinks is not None:
        sinks = p.sinks.float().resolve_neg()
    return KernelArgs(
        p.scale, p.softcap or 0.0, before, after, lo, hi, bits, bias, slopes, shift, sinks,
        p.dropout, seed,
    )  # fmt: skip


def why_not_operator(p: Problem, kernels: str) -> list[str]:
    """Why an operator of these `kernels` cannot answer, whatever the kernels are."""
    reasons = []
    if in_forward_mode():
        reasons.append(f"no forward-mode derivatives in {kernels}")
    if is_onnx_export():
        reasons.append(f"ONNX has no operator for {kernels}")
    if is_functionalized() and not in_functionalize():
        reasons.append(f"no transform inside of torch.func.functionalize in {kernels}")
    if compiles_transform():
        reasons.append(f"no torch.func inside of torch.compile in {kernels}")
    if isinstance(p.bias, Alibi) and shared_offset(p.bias.align, p.grid) is None:
        reasons.append(f"no ALiBi with a position per batch in {kernels}")
    elif isinstance(p.bias, Alibi) and p.grad and p.bias.needs_grad:
        reasons.append(f"no gradient of ALiBi slopes in {kernels}")
    elif p.bias is not None and not isinstance(p.bias, (Alibi, TensorBias)):
        reasons.append(f"no {p.bias!r} in {kernels}")
    return reasons


# What both hold of statistics: accumulators of rows, and sums of weights by their statistic.
ACCUMULATORS = {"", "moment", "top", "groups"}
SUMS = {"received", "pooled", "exact_rows"}


def in_kernels(statistic: Statistic) -> bool:
    """Do the kernels compute what this statistic is made of?"""
    if isinstance(statistic, RowStatistic):
        return statistic.accumulator in ACCUMULATORS
    return statistic.name in SUMS


BIAS, SINKS = (3 + KernelArgs._fields.index(name) for name in ("bias", "sinks"))  # among all


def with_rows(x: Tensor) -> Tensor:
    """The same numbers with a contiguous last dimension; any other strides may stay."""
    x = x.resolve_neg() if x.is_neg() else x
    return x if x.stride()[3] == 1 or x.shape[3] <= 1 else x.contiguous()


def with_own_buffers(function: Function) -> Function:
    """Hides from modes the functions of torch that `function` calls. A mode may return another
    tensor than a kernel is about to read or write by its address. Tracers see them still."""

    @wraps(function)
    def unseen(*args: Any, **keywords: Any) -> Any:
        if not sees_functions():
            return function(*args, **keywords)
        parts = (x for y in args for x in (y if isinstance(y, tuple) else (y,)))
        if not is_plain(*(x for x in parts if isinstance(x, Tensor))):
            return function(*args, **keywords)
        with torch._C.DisableTorchFunction():
            return function(*args, **keywords)

    return unseen  # type: ignore[return-value]  # it takes and returns what `function` does


def tensors_of(arguments: Iterable[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def savable(x: Any) -> Any:
    """Copies a mask or a bias made under torch.inference_mode, which autograd refuses to save."""
    refused = isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.is_inference()
    return x.clone() if refused else x


def save(ctx: Any, arguments: Sequence[Any], output: Sequence[Tensor]) -> None:
    """Keep a call for its gradient: tensors where autograd sees them, the rest beside them."""
    ctx.set_materialize_grads(False)
    ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.tensors = [isinstance(x, Tensor) for x in arguments]
    ctx.save_for_backward(*output, *tensors_of(arguments))


def saved(ctx: Any, outputs: int) -> tuple[tuple[Tensor, ...], list[Any]]:
    """The first `outputs` tensors that were kept, and the arguments."""
    kept = ctx.saved_tensors  # read once: a checkpoint computes again to give them
    tensors = iter(kept[outputs:])
    arguments = [
        next(tensors) if is_tensor else x
        for is_tensor, x in zip(ctx.tensors, ctx.others, strict=True)
    ]
    return kept[:outputs], arguments


def gradients_by_argument(
    grads: Sequence[Tensor], arguments: Sequence[Any], bias_grad: bool
) -> list[Tensor | None]:
    """The gradients of q, k, v, bias and sinks, each at the place of its argument."""
    dq, dk, dv, dbias, dsinks = grads
    found: list[Tensor | None] = [None] * len(arguments)
    found[:3] = dq, dk, dv
    found[BIAS] = dbias if bias_grad else None
    found[SINKS] = None if arguments[SINKS] is None else dsinks
    return found


def gradient_shapes(arguments: Sequence[Any], bias_grad: bool) -> tuple[Tensor, ...]:
    """Empty tensors like the gradients of q, k, v, bias and sinks, for tracers; of no size for a
    bias that needs none, and for no sinks."""
    q, k, v = arguments[:3]
    bias, sinks = arguments[BIAS], arguments[SINKS]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        bias.new_empty(bias.shape) if bias_grad else q.new_empty(0, dtype=torch.float32),
        q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape),
    )


def vmap_rule(
    call: Callable[..., Sequence[Tensor]],
    info: Any,
    in_dims: tuple[int | None, ...],
    *arguments: Any,
) -> tuple[Any, Any]:
    """vmap: a call for each example, then stacked. Without examples, one of zeros gives shapes."""
    count = info.batch_size
    pairs = [
        (x if count or dim is None else x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]]), dim)
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    answers = [
        call(*(x if dim is None else x.select(dim, i) for x, dim in pairs))
        for i in range(max(count, 1))
    ]
    together = tuple(torch.stack(parts)[:count] for parts in zip(*answers, strict=True))
    return together, (0,) * len(together)


def _transformed(
    function: type[torch.autograd.Function], call: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Applies a function under the innermost transform of torch.func. functionalize has no rule for
    it: there, `call` chooses again beneath it, since the operators change nothing in place."""
    if not in_functionalize():
        return function.apply(*arguments)
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

    functional = FunctorchFunctionalizeAPI(retrieve_current_functorch_interpreter())  # type: ignore[arg-type]  # the one for functionalize
    beneath = functional.unwrap_tensors(arguments)
    with functional.redispatch_to_next():
        output = call(*beneath)
    return functional.wrap_tensors(output)


class OperatorCalls(NamedTuple):
    """How eager code calls an operator and its gradient, whichever transforms it is under."""

    attend: Callable[..., Any]
    backward: Callable[..., Any]


def under_autograd(
    library: torch.library.Library,
    name: str,
    kernels: str,
    attend: Callable[..., Any],
    attend_backward: Callable[..., Any],
    save: Callable[..., None],
    back: Callable[..., Any],
) -> OperatorCalls:
    """Registers the gradient and the vmap of the operators `name` and `name`_backward, which
    `attend` and `attend_backward` of these `kernels` compute. `save` keeps a call, and `back` gives
    its gradients.

    torch.library's own way would be enough, and is taken under tracers. Eager code has three more,
    each for a reason that was measured or found in torch (2.13):

    - Calls of plain tensors take `Eager`. A training step of (1, 1, 5, 4) takes 108 us with it, 128
      us with a Function that has `setup_context`, and 188 us through torch.library.
    - torch.func refuses an operator's own autograd, which has no `setup_context`: hence `Attend`.
    - The same holds for the backward operator, where gradients are batched or taken in a graph:
      hence `AttendBackward`.
    """
    operator = getattr(torch.ops.clearhead, name)
    operator_backward = getattr(torch.ops.clearhead, f"{name}_backward")

    def call(*arguments: Any) -> Any:
        if in_transform():
            return _transformed(Attend, call, arguments)
        if is_plain(*tensors_of(arguments)):
            return Eager.apply(*arguments)
        return operator(*arguments)

    def call_backward(*arguments: Any) -> Any:
        if in_transform():
            return _transformed(AttendBackward, call_backward, arguments)
        tensors = tensors_of(arguments)
        if has_tangents(*tensors):
            raise BadValue(
                "A gradient of attention is to be differentiated in forward mode.",
                f"{kernels} has no forward-mode derivatives, of its gradients neither.",
                "pass engine='tiled', which torch differentiates in every mode.",
            )
        if not torch.is_grad_enabled() and is_unbatched(*tensors):
            return attend_backward(*arguments)
        return operator_backward(*arguments)

    def no_second(ctx: Any, *gradients: Any) -> None:
        raise BadValue(
            "A gradient of attention is to be differentiated again.",
            f"{kernels} has first derivatives.",
            "pass engine='tiled' (or 'steps', for short inputs), which torch differentiates any "
            "number of times; layers of clearhead.nn have second derivatives in float64.",
        )

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = attend(*arguments)
            save(ctx, arguments, output)
            return output

        backward = staticmethod(back)

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

        setup_context = staticmethod(save)
        backward = staticmethod(back)
        vmap = staticmethod(partial(vmap_rule, call))

    class AttendBackward(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator_backward(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        backward = staticmethod(no_second)
        vmap = staticmethod(partial(vmap_rule, call_backward))

    qualified = f"clearhead::{name}"
    torch.library.register_autograd(qualified, back, setup_context=save, lib=library)
    torch.library.register_autograd(f"{qualified}_backward", no_second, lib=library)
    torch.library.register_vmap(qualified, partial(vmap_rule, call), lib=library)
    torch.library.register_vmap(
        f"{qualified}_backward", partial(vmap_rule, call_backward), lib=library
    )
    return OperatorCalls(call, call_backward)
