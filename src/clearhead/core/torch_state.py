"""Find out what torch does around a call: compile, trace, transform, record gradients."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included as is_included,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import checkpoint

TRACING_MODES = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
PRE_DISPATCH = DispatchKey.PreDispatch  # where make_fx(pre_dispatch=True) and torch.export record
LEGACY_VMAP = torch._C._dispatch_key_parse("VmapMode")  # of autograd, beneath torch.func's
PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None)}


Class = TypeVar("Class", bound=type)
LOADABLE: dict[str, type] = {}  # what files may hold, by name


def loadable(kind: Class) -> Class:
    """Let `torch.load` read saved values of this class with its default, ``weights_only=True``,
    and let `results` save and load them."""
    LOADABLE[kind.__name__] = kind
    torch.serialization.add_safe_globals([kind])
    return kind


def in_transform() -> bool:
    """Is the call inside a transform of torch.func (vmap, grad, vjp, ...) that runs eagerly?"""
    return not torch.compiler.is_compiling() and _has_transform()


def compiles_transform() -> bool:
    """Is the call inside a transform of torch.func that torch.compile is tracing?"""
    return torch.compiler.is_compiling() and _has_transform()


def _has_transform() -> bool:
    return peek_interpreter_stack() is not None


def in_functionalize() -> bool:
    """Is torch.func.functionalize the innermost transform of a call that runs eagerly?"""
    innermost = None if torch.compiler.is_compiling() else peek_interpreter_stack()
    return innermost is not None and innermost.key() == TransformType.Functionalize


def is_functionalized() -> bool:
    """Is torch.func.functionalize among the transforms of a call that runs eagerly?"""
    return in_transform() and any(
        x.key() == TransformType.Functionalize for x in get_interpreter_stack()
    )


# torch.compile 2.10 cannot trace this function. The attribute makes it guard on the result, as
# `torch.compiler.assume_constant_result` does, without importing the compiler.
_has_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def requires_grad(*tensors: Tensor | None) -> bool:
    """Does one of these require a gradient, itself or inside a transform of torch.func?"""
    for x in tensors:
        if x is not None and x.requires_grad:
            return True
    return in_transform() and any(
        inner.requires_grad for x in tensors if x is not None for inner in _unwrapped(x)
    )


def records_grad(*tensors: Tensor | None) -> bool:
    """Does autograd now record operations on one of these?"""
    return torch.is_grad_enabled() and requires_grad(*tensors)


def has_values(*tensors: Tensor) -> bool:
    """Can the values of these tensors be read now?

    They cannot on the meta device, while torch traces, under vmap, in torch.func.functionalize, or
    while a CUDA graph is captured, which reading would end.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_tracing()
        and not is_functionalized()
        and not any(_is_batched(x) or x.is_meta or _is_captured(x) for x in tensors)
    )


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def without_repeats(x: Tensor) -> Tensor:
    """Return `x` with size 1 in the dimensions in which `expand` repeats one slice.

    The result broadcasts to the shape of `x`, and a copy of it does not hold the repetitions.
    """
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def is_batched(*tensors: Tensor) -> bool:
    """Is one of these a batch that vmap presents as a single example?"""
    return any(map(_is_batched, tensors))


def is_unbatched(*tensors: Tensor | None) -> bool:
    """Are these `is_plain`, and not `is_batched`?"""
    return is_plain(*tensors) and not is_batched(*(x for x in tensors if x is not None))


def _is_batched(x: Tensor) -> bool:
    if not is_functorch_wrapped_tensor(x):
        return is_legacy_batchedtensor(x)
    return any(map(torch._C._functorch.is_batchedtensor, _unwrapped(x)))


def _unwrapped(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensor and the tensors inside its functorch wrappers, from the outermost in."""
    yield x
    while is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        yield x


def inference_ended(x: Tensor) -> bool:
    """Is this a tensor of torch.inference_mode, used outside that mode?"""
    return (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def is_tracing() -> bool:
    """Does torch.jit.trace, make_fx or a fake tensor mode record the operations?"""
    return (
        _get_tracing_state() is not None
        or is_included(PRE_DISPATCH)
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in TRACING_MODES)
    )


def is_onnx_export() -> bool:
    """Does torch.onnx.export record the operations?"""
    traced = torch.compiler.is_compiling() or _get_tracing_state() is not None
    return traced and torch.onnx.is_in_onnx_export()


def is_autocast(device: torch.device) -> bool:
    """Is autocast enabled for this device? Some devices, such as meta, do not support it."""
    kind, some = device.type, torch._C._is_any_autocast_enabled()
    return some and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which matrix products keep the dtype of their arguments."""
    if not is_autocast(device):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def own_dtypes() -> Iterator[None]:
    """Disable autocast for all devices, in a block or a decorated function."""
    with torch._C._DisableAutocast():
        yield


def in_backward() -> bool:
    """Does the backward pass run now? In it, activation checkpoints recompute layers."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def ends_recomputation(error: BaseException) -> bool:
    """Is this the error by which a checkpoint ends a recomputation, at the last tensor it needs?"""
    return type(error).__name__ == "_StopRecomputationError"


def in_autograd_function() -> bool:
    """Does the forward of a `torch.autograd.Function` run? Its operations record no gradients.

    A checkpoint with ``use_reentrant=True`` is such a function.
    """
    return any(name == "forward" for _, name in running_functions())


def running_functions() -> Iterator[tuple[Any, str]]:
    """Yield the contexts of the autograd functions that run, the innermost first.

    Each is with the name of the method that runs, "forward" or "backward". A checkpoint with
    ``use_reentrant=False`` that recomputes its layers is (None, "recompute_fn").
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, FunctionCtx):
                yield first, code.co_name
        elif code.co_name == "recompute_fn" and code.co_filename == checkpoint.__file__:
            yield None, code.co_name
        frame = frame.f_back


def checkpoint_with(pack: Any) -> Any:
    """Return the frame of the checkpoint with ``use_reentrant=False`` whose hook on saved tensors
    is `pack`, or None for another hook, which a checkpoint has while it recomputes."""
    if getattr(pack, "__module__", "") != checkpoint.__name__:
        return None
    cells = [cell.cell_contents for cell in pack.__closure__ or ()]
    return next((x for x in cells if isinstance(x, checkpoint._CheckpointFrame)), None)


def batches_gradients() -> bool:
    """Is this a backward pass of is_grads_batched=True or jacobian(vectorize=True)?

    Few operations of torch have a batching rule in it.
    """
    return in_backward() and is_included(LEGACY_VMAP)


def in_forward_mode() -> bool:
    """Is forward-mode differentiation (jvp, jacfwd) active?

    A kernel without a forward-mode rule would then drop the tangents silently.
    """
    return forward_ad._current_level >= 0


def has_tangents(*tensors: Tensor) -> bool:
    """Does one of these have a forward-mode tangent?"""
    return in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_plain(*tensors: Tensor | None) -> bool:
    """Can a kernel be called with the addresses of these tensors?

    They must be ordinary tensors with memory, and nothing may compile or intercept the call.
    """
    return (
        not torch.compiler.is_compiling()
        and _get_tracing_state() is None
        and _len_torch_dispatch_stack() == 0
        and not is_included(PRE_DISPATCH)
        and not is_included(LEGACY_VMAP)
        and peek_interpreter_stack() is None
        and all(map(PLAIN_TYPES.__contains__, map(type, tensors)))
    )


def is_undisturbed() -> bool:
    """Does nothing intercept, batch or differentiate the operations of an eager call?

    It is one expression, because a small call spends most of its time in checks.
    """
    return (
        _get_tracing_state() is None
        and _len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and not is_included(PRE_DISPATCH)
        and not is_included(LEGACY_VMAP)
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


class OwnMode(TorchFunctionMode):
    """A mode of clearhead, which returns what torch returns."""


def sees_functions() -> bool:
    """Does a `TorchFunctionMode` other than ours intercept the functions of torch in an eager
    call?"""
    return (
        not torch.compiler.is_compiling()
        and _len_torch_function_stack() != 0
        and not isinstance(_get_current_function_mode(), OwnMode)
    )


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


def one_thread_after_fork() -> None:
    """Set torch to one thread at the first call in a forked child.

    The threads of its pool do not survive a fork, and an operation that waits for them never
    returns.
    """
    global _forked
    if _forked:
        _forked = False
        torch.set_num_threads(1)


def compiled_parts(model: nn.Module) -> list[str]:
    """Return the names of the modules that torch.compile has compiled, "" for the model itself."""
    return [name for name, part in model.named_modules() if _is_compiled(part)]


def _is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__module__ == "torch._dynamo.eval_frame"  # torch.compile(module)
        or getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
    )
