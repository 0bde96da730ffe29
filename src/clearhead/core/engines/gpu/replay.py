"""Repeat on the host what an earlier call like this one did.

To launch a kernel, Python chooses tiles and splits, allocates buffers, and finds out for which
types of arguments the kernel is compiled. All of this follows from the layouts of the tensors and
from the other arguments, and takes longer than a small call takes the device. So the seventh call
of a kind is recorded (`recorder.py`), and later calls repeat its steps with their own tensors.

Tensors that a function computes with must be among its arguments, also those of a mask or of a
statistic. What is computed once for many calls, as which queries see a tile of keys, is an argument
too.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from .recorder import Recorder

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_RECORDS = 1024  # of a function
# To record a call takes as long as five replayed calls save. With a cache that grows by a token,
# each layer of a model makes one call of a kind.
PLAIN_CALLS = 6
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
NUMBERS = frozenset({float, int, bool, type(None)})
NOT_RECORDABLE = -1


class _Inside(threading.local):
    """Whether a call runs that is counted or recorded: calls inside it are a part of it."""

    call = False


_inside = _Inside()


class Records:
    """The records of the calls of a function, by what they depend on."""

    def __init__(self) -> None:
        # For each kind its record, or the number of its calls so far.
        self._by_kind: dict[tuple[Any, ...], Callable[..., Any] | int] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `function(*args)`, by the steps of an earlier call if there was one.

        What the function does may depend on the layouts of the tensors among `args`, also those
        inside tuples, on the other `args`, which are hashable, and on `settings`.
        """
        kind: list[Any] = []
        tensors: list[Tensor] = []
        if _inside.call or not _describe(args, kind, tensors):
            return function(*args)
        of = (*kind, *settings(tensors[0].device, tensors[0].dtype))
        record = self._by_kind.get(of, 0)
        if callable(record):
            with on_device(tensors[0]):
                result = record(*tensors)
            return function(*args) if result is None else result
        if record == NOT_RECORDABLE:
            return function(*args)
        _inside.call = True
        try:
            if record < PLAIN_CALLS or not _can_record():
                if len(self._by_kind) >= MOST_RECORDS:
                    self._by_kind.clear()
                self._by_kind[of] = min(record + 1, PLAIN_CALLS)
                return function(*args)
            with Recorder(tensors) as recorder:
                result = function(*args)
            self._by_kind[of] = recorder.record(result) or NOT_RECORDABLE
            return result
        finally:
            _inside.call = False


def replayed(function: Function) -> Function:
    """Let later calls of a function repeat the steps of an earlier one, as `Records.call`."""
    records = Records()

    @wraps(function)
    def call(*args: Any) -> Any:
        return records.call(function, args)

    return call  # type: ignore[return-value]  # the signature of `function`


def _describe(args: Iterable[Any], kind: list[Any], tensors: list[Tensor]) -> bool:
    """Add the tensors among the arguments to `tensors`, each once, and their layouts and the other
    arguments to `kind`. Return whether all tensors are plain."""
    for x in args:
        of = type(x)
        if of in NUMBERS:
            kind.append(x)
        elif of in PLAIN_TYPES:
            for i, y in enumerate(tensors):
                if y is x:  # `attention(x, x, x)`
                    kind.append(("again", i))
                    break
            else:
                tensors.append(x)
                aligned = x.data_ptr() % 16 == 0
                kind.append((x.shape, x.stride(), x.dtype, aligned, x.is_neg(), x.requires_grad))
        elif isinstance(x, tuple):
            kind.append((of, len(x)))
            if not _describe(x, kind, tensors):
                return False
        elif isinstance(x, Tensor):
            return False
        else:
            kind.append(x)
    return True


def settings(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the device, the dtype, and what settings of torch decide about kernels for them."""
    return (
        device,
        dtype,
        dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    )


def _can_record() -> bool:
    """Return whether only the recorder would intercept the functions of torch."""
    return torch._C._is_torch_function_enabled() and torch._C._len_torch_function_stack() == 0


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because kernels start on the current device."""
    if not x.is_cuda or torch.cuda.current_device() == x.get_device():
        return nullcontext()
    return torch.cuda.device(x.get_device())
