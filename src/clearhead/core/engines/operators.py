"""Define what the operators of the C++ core and of the Triton kernels have in common.

This is: what they cannot compute, which statistics they compute, their arguments, what autograd
saves, the shapes of gradients, vmap, and the registration of all of these.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from .. import torch_state
from ..errors import BadValue
from ..masks import Grid, Mask
from ..masks.key_ranges import UNLIMITED, KeyRanges
from ..masks.values import shared_offset
from ..problem.biases import Alibi, TensorBias
from ..problem.problem import Problem
from ..stats import Statistic
from ..stats.per_key import PerKey
from ..stats.statistic import RowStatistic

Function = TypeVar("Function", bound=Callable[..., Any])

# SymInt: in a graph for any length, the positions of the queries may depend on the length.
SIGNATURE = (
    "Tensor q, Tensor k, Tensor v, float scale, float softcap, SymInt before, SymInt after, "
    "Tensor? lo, Tensor? hi, Tensor? bits, Tensor? bias, Tensor? slopes, SymInt shift, "
    "Tensor? sinks, float dropout, Tensor? seed"
)


class KernelArgs(NamedTuple):
    """The arguments besides q, k and v. Query q sees the keys q - before to q + after; with `lo`,
    it sees the keys of its ranges whose `bits` are set. `slopes` and `shift` are ALiBi's."""

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


# A mask as arguments of a kernel: before, after, lo, hi, bits.
MaskArgs: TypeAlias = tuple[int, int, Tensor | None, Tensor | None, Tensor | None]
UNMASKED: MaskArgs = (UNLIMITED, UNLIMITED, None, None, None)


def mask_args(mask: Mask, grid: Grid, key_ranges: Callable[[], KeyRanges]) -> MaskArgs:
    """Return a mask as arguments of a kernel; `key_ranges` computes its ranges.

    A band is two numbers. Tensors would be most of the cost of a small call.
    """
    if (band := mask.band(grid)) is not None:
        return *band, None, None, None
    ranges = key_ranges()
    return UNLIMITED, UNLIMITED, ranges.lo, ranges.hi, ranges.bits


def kernel_args(p: Problem, seed: int | Tensor | None) -> KernelArgs:
    """Return a problem's mask, bias, sinks and dropout as arguments of a kernel."""
    seen = mask_args(p.mask, p.grid, lambda: p.key_ranges) if p.masked else UNMASKED
    bias = slopes = sinks = None
    shift = 0
    if isinstance(p.bias, TensorBias):
        bias = p.bias.as_4d().resolve_neg()
    elif isinstance(p.bias, Alibi):
        slopes = p.bias.of(p.grid, p.device, torch.float32).resolve_neg()
        shift = shared_offset(p.bias.align, p.grid) or 0  # `why_not_operator` declines None
    if p.sinks is not None:
        sinks = p.sinks.float().resolve_neg()
    return KernelArgs(
        p.scale, p.softcap or 0.0, *seen, bias, slopes, shift, sinks, p.dropout, seed
    )  # fmt: skip


def why_not_operator(p: Problem, kernels: str) -> list[str]:
    """Return why an operator cannot compute the problem; `kernels` is the name used in the text."""
    reasons = []
    if torch_state.in_forward_mode():
        reasons.append(f"no forward-mode derivatives in {kernels}")
    if torch_state.is_onnx_export():
        reasons.append(f"ONNX has no operator for {kernels}")
    if torch_state.is_functionalized() and not torch_state.in_functionalize():
        reasons.append(f"no transform inside torch.func.functionalize in {kernels}")
    if torch_state.compiles_transform():
        reasons.append(f"no torch.func inside torch.compile in {kernels}")
    if isinstance(p.bias, Alibi) and shared_offset(p.bias.align, p.grid) is None:
        reasons.append(f"no ALiBi with a position per batch in {kernels}")
    elif isinstance(p.bias, Alibi) and p.grad and p.bias.needs_grad:
        reasons.append(f"no gradient of ALiBi slopes in {kernels}")
    elif p.bias is not None and not isinstance(p.bias, (Alibi, TensorBias)):
        reasons.append(f"no {p.bias!r} in {kernels}")
    return reasons


# What both kernels compute for statistics: accumulators of rows, and sums of weights.
ACCUMULATORS = {"", "moment", "top", "groups", "weighted", "value_weighted"}
SUMS = {"received", "pooled", "exact_rows"}


def in_kernels(statistic: Statistic) -> bool:
    """Return whether the kernels compute the accumulators of this statistic.

    Their lists of `topk` would leave out a key whose number is NaN.
    """
    if statistic.by is not None and statistic.name == "topk" and cast(PerKey, statistic.by).has_nan:
        return False
    if statistic.sweep == "first":
        return cast(RowStatistic, statistic).accumulator in ACCUMULATORS
    return statistic.name in SUMS and not statistic.own_pass


# The number of all arguments, with q, k and v, and the positions of the bias and the sinks.
ARGUMENTS = 3 + len(KernelArgs._fields)
BIAS, SINKS = (3 + KernelArgs._fields.index(name) for name in ("bias", "sinks"))


def with_rows(x: Tensor) -> Tensor:
    """Return the same numbers with a contiguous last dimension; other strides are kept."""
    x = x.resolve_neg() if x.is_neg() else x
    if x.stride(3) == 1 or x.shape[3] <= 1:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps strides without rows


def with_own_buffers(function: Function) -> Function:
    """Hide torch calls made by `function` from torch function modes, but not from tracers.

    A mode may return another tensor, but a kernel reads and writes a tensor by its address.
    """

    @wraps(function)
    def hidden(*args: Any, **keywords: Any) -> Any:
        if not torch_state.sees_functions():
            return function(*args, **keywords)
        parts = (x for y in args for x in (y if isinstance(y, tuple) else (y,)))
        if not torch_state.is_plain(*(x for x in parts if isinstance(x, Tensor))):
            return function(*args, **keywords)
        with torch._C.DisableTorchFunction():
            return function(*args, **keywords)

    return hidden  # type: ignore[return-value]  # the signature of `function`


def tensors_of(arguments: Iterable[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def savable(x: Any) -> Any:
    """Copy a tensor made under torch.inference_mode, which autograd refuses to save; return
    anything else unchanged."""
    refused = isinstance(x, Tensor) and not torch.compiler.is_compiling() and x.is_inference()
    return x.clone() if refused else x


def _saved(ctx: Any, outputs: int) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Return the saved outputs, of which there are `outputs`, and the saved arguments."""
    all_saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them
    tensors = iter(all_saved[outputs:])
    arguments = [
        next(tensors) if is_tensor else x
        for is_tensor, x in zip(ctx.tensors, ctx.others, strict=True)
    ]
    return all_saved[:outputs], arguments


def vmap_rule(
    call: Callable[..., Sequence[Tensor]], info: Any, in_dims: tuple[int | None, ...],
    *arguments: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Apply an operator under vmap: call it for each example, and stack the outputs. For an empty
    batch, a call with zeros yields the shapes."""
    count = info.batch_size
    pairs = [
        (x if count or dim is None else x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]]), dim)
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    outputs = [
        call(*(x if dim is None else x.select(dim, i) for x, dim in pairs))
        for i in range(max(count, 1))
    ]
    stacked = tuple(torch.stack(parts)[:count] for parts in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)


def _transformed(
    function: type[torch.autograd.Function], call: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Apply a function under the innermost torch.func transform.

    torch.func.functionalize has no rule for such a function. Since the operators change nothing in
    place, `call` is called again below that transform.
    """
    if not torch_state.in_functionalize():
        return function.apply(*arguments)
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
    from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

    functional = FunctorchFunctionalizeAPI(retrieve_current_functorch_interpreter())  # type: ignore[arg-type]  # the one for functionalize
    unwrapped = functional.unwrap_tensors(arguments)
    with functional.redispatch_to_next():
        output = call(*unwrapped)
    return functional.wrap_tensors(output)


def recorded_call(
    attend: Callable[..., Sequence[Tensor]],
    gradients: Callable[..., Sequence[Any]],
    operator_backward: Callable[..., Sequence[Any]],
) -> type[torch.autograd.Function]:
    """Return a function for calls that autograd records, of plain tensors, without bias, sinks,
    ALiBi and dropout: (q, k, v, arguments) -> output.

    It passes autograd four arguments and one output, which for 16 tokens takes half the time that
    the function of the operator takes with its 17 and three. It saves the same tensors: the
    operator computes a call that `watch` records, and a checkpoint may recompute it here.

    Args:
        attend: (q, k, v, arguments) -> all outputs of the operator.
        gradients: (dout, None, all outputs, q, k, v, arguments, False) -> the gradients of q, k and
            v first.
        operator_backward: the gradient of the operator, for calls that are not plain.
    """

    class RecordedCall(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> Tensor:
            outputs = attend(q, k, v, args)
            ctx.numbers, ranges = args[:4], map(savable, args[4:7])
            ctx.save_for_backward(*outputs, q, k, v, *ranges)
            return outputs[0]

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
            *outputs, q, k, v, lo, hi, bits = saved = ctx.saved_tensors
            numbers: tuple[float, float, int, int] = ctx.numbers
            args = KernelArgs(*numbers, lo, hi, bits)
            if (
                not torch.is_grad_enabled()
                and torch_state.is_undisturbed()
                and torch_state.is_plain(dout, *saved)
            ):
                grads = gradients(dout, None, *outputs, q, k, v, args, False)
            else:
                grads = operator_backward(dout, None, *outputs, q, k, v, *args, False)
            return *grads[:3], None

    return RecordedCall


def is_recordable(p: Problem, args: KernelArgs) -> bool:
    """Return whether a `recorded_call` computes the problem, whose tensors are plain."""
    others = args.bias is args.slopes is args.sinks is args.seed is None
    return others and not p.dropout and torch_state.is_undisturbed()


class OperatorCalls(NamedTuple):
    """Functions that call an operator and its gradient, under any torch.func transform."""

    attend: Callable[..., Any]
    backward: Callable[..., Any]


def define_operator(
    library: torch.library.Library, name: str, kernels: str, devices: Sequence[str], flags: str,
    outputs: str, differentiable: int, attend: Callable[..., Sequence[Tensor]],
    gradients: Callable[..., Sequence[Tensor | None]], shapes: Callable[..., Any],
) -> OperatorCalls:  # fmt: skip
    """Define the operators `name` and `name`_backward, with gradient, vmap rule and fakes.

    `attend` and `gradients` compute them on `devices`. The first takes q, k, v, `KernelArgs` and
    `flags`, and returns `outputs`, whose `shapes` are for tracers. The first `differentiable` of
    them have a gradient, which needs the outputs of a call with all flags. `gradients` takes the
    gradients of the first two outputs, all outputs, q, k, v, `KernelArgs`, and whether the bias
    needs a gradient; it returns the gradients of q, k, v, bias and sinks, or None. `kernels` is the
    name used in errors.

    The registration by torch.library would suffice, and tracers use it. Eager code uses one of
    three other functions, for reasons in torch 2.13:

    - `Eager`, for plain tensors, because it is faster. A training step of (1, 1, 5, 4) takes 108 us
      with it, 128 us with a Function that has `setup_context`, and 188 us by torch.library.
    - `Attend`, under torch.func, which refuses the autograd of an operator, as that has no
      `setup_context`.
    - `AttendBackward`, for the same reason, if gradients are batched or differentiated.
    """
    tensors = [f"Tensor {output}" for output in outputs.split()]
    library.define(f"{name}({SIGNATURE}{flags}) -> ({', '.join(['Tensor'] * len(tensors))})")
    library.define(
        f"{name}_backward(Tensor dout, Tensor? dlse, {', '.join(tensors)}, {SIGNATURE}, "
        "bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    count = len(tensors)
    empty = partial(Tensor.new_empty, size=(0,), dtype=torch.float32)  # no gradient

    @with_own_buffers
    def compute(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Sequence[Tensor]:
        args, switches = rest[: ARGUMENTS - 3], rest[ARGUMENTS - 3 :]
        return attend(q, k, v, KernelArgs(*args), *switches)

    @with_own_buffers
    def compute_backward(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        known, (*args, bias_grad) = rest[: count + 3], rest[count + 3 :]
        grads = gradients(dout, dlse, *known, KernelArgs(*args), bias_grad)
        return tuple(empty(dout) if x is None else x for x in grads)

    def backward_shapes(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        *arguments, bias_grad = rest[count:]
        of = *arguments[:3], arguments[BIAS] if bias_grad else None, arguments[SINKS]
        return tuple(empty(dout) if x is None else x.new_empty(x.shape) for x in of)

    for device in devices:
        library.impl(name, compute, device)
        library.impl(f"{name}_backward", compute_backward, device)

    qualified = f"clearhead::{name}"
    torch.library.register_fake(qualified, shapes, lib=library)
    torch.library.register_fake(f"{qualified}_backward", backward_shapes, lib=library)
    operator = getattr(torch.ops.clearhead, name)
    operator_backward = getattr(torch.ops.clearhead, f"{name}_backward")

    def call(*arguments: Any) -> Any:
        if torch_state.in_transform():
            return _transformed(Attend, call, arguments)
        if torch_state.is_plain(*tensors_of(arguments)):
            return Eager.apply(*arguments)
        return operator(*arguments)

    def call_backward(*arguments: Any) -> Any:
        if torch_state.in_transform():
            return _transformed(AttendBackward, call_backward, arguments)
        tensors = tensors_of(arguments)
        if torch_state.has_tangents(*tensors):
            rule = f"{kernels} has no forward-mode derivatives."
            hint = "pass engine='tiled', which torch can differentiate in any mode."
            raise BadValue("You differentiate a gradient of attention in forward mode.", rule, hint)
        if not torch.is_grad_enabled() and torch_state.is_unbatched(*tensors):
            return compute_backward(*arguments)
        return operator_backward(*arguments)

    def save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        """Save a call for its gradient: tensors by autograd, other arguments on `ctx`."""
        ctx.mark_non_differentiable(*output[differentiable:])
        ctx.set_materialize_grads(False)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.tensors = [isinstance(x, Tensor) for x in inputs]
        ctx.save_for_backward(*output, *tensors_of(inputs))

    @with_own_buffers
    def back(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        results, inputs = _saved(ctx, count)
        arguments, switches = inputs[:ARGUMENTS], inputs[ARGUMENTS:]
        if not all(switches):  # a graph exported without gradients
            results = call(*arguments, *(True for _ in switches))
        dout = torch.zeros_like(results[0]) if dout is None else dout
        bias_grad = ctx.needs_input_grad[BIAS]
        grads = call_backward(dout, dlse, *results, *arguments, bias_grad)
        by_argument = [*grads[:3], *(None for _ in inputs[3:])]
        if bias_grad:
            by_argument[BIAS] = grads[3]
        if arguments[SINKS] is not None:
            by_argument[SINKS] = grads[4]
        return tuple(by_argument)

    def no_second(ctx: Any, *gradients: Any) -> None:
        rule = f"{kernels} has only first derivatives."
        hint = "pass engine='tiled' (short inputs: 'steps'), or use float64, in clearhead.nn too."
        raise BadValue("A second derivative of attention was requested.", rule, hint)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = compute(*arguments)
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

    torch.library.register_autograd(qualified, back, setup_context=save, lib=library)
    torch.library.register_autograd(f"{qualified}_backward", no_second, lib=library)
    for operation, of in ((qualified, call), (f"{qualified}_backward", call_backward)):
        torch.library.register_vmap(operation, partial(vmap_rule, of), lib=library)
    return OperatorCalls(call, call_backward)
