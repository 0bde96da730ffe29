"""Who else follows a call: a compiler, a transform of torch.func, derivatives that ride along."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad

GRAPHS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def in_transform() -> bool:
    """Does a transform (vmap, grad, vjp) stand between the numbers and who asked?"""
    return not torch.compiler.is_compiling() and _inside_a_transform()


def compiles_transform() -> bool:
    """Does a transform stand inside of what torch.compile makes a graph of?"""
    return torch.compiler.is_compiling() and _inside_a_transform()


def _inside_a_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# `torch.compiler.assume_constant_result`, without loading the compiler: torch.compile 2.10 cannot
# follow the question, and guards the answer.
_inside_a_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function's own


def requires_grad(*tensors: Tensor | None) -> bool:
    """Is a gradient of one of these wanted, by whoever asks or by one of the transforms around?"""
    for x in tensors:
        if x is not None and x.requires_grad:
            return True
    return in_transform() and any(
        inner.requires_grad for x in tensors if x is not None for inner in _layers(x)
    )


def has_values(*tensors: Tensor) -> bool:
    """Can these numbers be looked at? Not on meta, not while a graph is made of the call, and not
    where vmap holds many in the place of one."""
    return not torch.compiler.is_compiling() and not is_tracing() and all(map(_at_hand, tensors))


def is_batched(*tensors: Tensor) -> bool:
    """Does vmap hold many of these in the place of one?"""
    return any(map(_batched, tensors))


def is_unbatched(*tensors: Tensor | None) -> bool:
    """`is_plain`, and each is one tensor, not many in the place of one."""
    return is_plain(*tensors) and not is_batched(*(x for x in tensors if x is not None))


def _batched(x: Tensor) -> bool:
    batch = torch._C._functorch
    # The second is what `is_grads_batched` makes, and vectorize=True.
    return any(map(batch.is_batchedtensor, _layers(x))) or batch.is_legacy_batchedtensor(x)


def _layers(x: Tensor) -> Iterator[Tensor]:
    """The tensor, and what each transform around wraps."""
    yield x
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
        yield x


def is_tracing() -> bool:
    """Is a graph made of what is computed, by torch.jit.trace, make_fx or with fake tensors?"""
    return torch._C._get_tracing_state() is not None or any(
        torch._C._get_dispatch_mode(mode) is not None for mode in GRAPHS
    )


def _at_hand(x: Tensor) -> bool:
    return not _batched(x) and x.device.type != "meta"


def is_onnx_export() -> bool:
    """Is an ONNX model made of what is computed? ONNX has operators of its own."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return traced and torch.onnx.is_in_onnx_export()


def is_autocast(device: torch.device) -> bool:
    """Does autocast convert what is computed on this device? Where there is none (meta), no."""
    kind, any_does = device.type, torch._C._is_any_autocast_enabled()
    return any_does and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Products inside keep the dtype of their arguments: autocast would narrow them."""
    if not is_autocast(device):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def in_backward() -> bool:
    """Is this computed in a backward pass, as a checkpoint computes its layers again?"""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def in_forward_mode() -> bool:
    """Are derivatives carried along with the numbers (jvp, jacfwd)? Only torch's own operations do,
    and a kernel that does not would lose them without a word."""
    return forward_ad._current_level >= 0


def has_tangents(*tensors: Tensor) -> bool:
    """Does one of these carry derivatives along?"""
    return in_forward_mode() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_plain(*tensors: Tensor | None) -> bool:
    """Are these tensors with memory behind them, and does nobody follow what happens to them?"""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(map(PLAIN.__contains__, map(type, tensors)))
    )


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


def one_thread_after_fork() -> None:
    """In a forked child, let torch compute on one thread, once: the threads of its pool do not
    survive a fork, and an operation that waits for them would wait for ever."""
    global _forked
    if _forked:
        _forked = False
        torch.set_num_threads(1)
