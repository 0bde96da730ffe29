"""Repeat on the host what an earlier call like this one did.

To launch a kernel, Python chooses tiles and splits, allocates buffers, and finds out for which
types of arguments the kernel is compiled. All of this follows from the layouts of the tensors and
from the other arguments, and takes longer than a small call takes the device. So the second call of
a kind is recorded: the functions of torch that it calls, and the kernels that it starts. Later
calls repeat these steps with their own tensors.

A record holds no tensors. Those of a call are numbered, first its arguments, then the results of
its steps. A step knows the numbers of its tensors, and everything else is a constant. Therefore a
recorded function must not read values of tensors, or enter a mode of torch. A call is not recorded
if a function of torch returns anything but tensors or a part of their layout. It is not recorded
either if a step takes a tensor that is neither an argument nor a result.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...torch_state import OwnMode

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_RECORDS = 1024  # of a function
PLAIN_TYPES = Tensor, torch.nn.Parameter
LAYOUT = {  # functions of torch that a recorded function may call without a step
    "__get__",  # a property
    "__len__", "data_ptr", "dim", "element_size", "get_device", "is_contiguous", "is_neg", "numel",
    "size", "stride",
    "_set_grad_enabled",  # a replayed call records no gradients
}  # fmt: skip
SEEN, NOT_RECORDABLE = "seen once", "not recordable"


class TensorNumber(NamedTuple):
    """The number of a tensor among those of a call."""

    number: int


class Template(NamedTuple):
    """A tuple, list or dict with a `TensorNumber` for each tensor; `make` makes it of parts."""

    make: Callable[[list[Any]], Any]
    parts: list[Any]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        return self.make(
            [
                tensors[x[0]] if type(x) is TensorNumber else
                x.filled(tensors) if type(x) is Template else x
                for x in self.parts
            ]
        )  # fmt: skip


class Step(NamedTuple):
    """A call of torch, or the start of a kernel."""

    function: Callable[..., Any]
    arguments: Template
    keywords: dict[str, Any]


class Record(NamedTuple):
    """The steps of a call, and its result (in a tuple)."""

    steps: list[Step]
    result: Template

    def repeat(self, tensors: list[Tensor]) -> Any:
        """Repeat the steps with the tensors among the arguments of another call."""
        with on_device(tensors[0]):
            for function, arguments, keywords in self.steps:
                tensors += _tensors(function(*arguments.filled(tensors), **keywords))
        return self.result.filled(tensors)[0]


class Recorder(OwnMode):
    """Records the steps of the call in its `with` block."""

    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        self.complete = True
        self.steps: list[Step] = []
        self.tensors: list[Tensor] = []  # kept, so that no two have the same id
        self.numbers: dict[int, int] = {}
        self._number(arguments)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = _tensors(result)
        if tensors or (result is None and _tensors(args)):
            self.add(function, args, kwargs or {})
            self._number(tensors)
        elif function.__name__ not in LAYOUT:
            self.complete = False
        return result

    def add(
        self, function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Add a step that has been done."""
        self.complete = self.complete and not _tensors(list(keywords.values()))
        self.steps.append(Step(function, self._template(args), keywords))

    def record(self, result: Any) -> Record | None:
        """Return the record of the call, which returned `result`, or None if it has none."""
        record = Record(self.steps, self._template((result,)))
        return record if self.complete else None

    def _number(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            self.numbers.setdefault(id(x), len(self.tensors))
            self.tensors.append(x)

    def _template(self, parts: Any) -> Template:
        if isinstance(parts, dict):
            names = list(parts)
            make = lambda values: dict(zip(names, values, strict=True))  # noqa: E731
            return Template(make, [self._part(x) for x in parts.values()])
        return Template(getattr(parts, "_make", type(parts)), [self._part(x) for x in parts])

    def _part(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.complete = self.complete and id(x) in self.numbers
            return TensorNumber(self.numbers.get(id(x), 0))
        if not isinstance(x, (tuple, list, dict)):
            return x
        template = self._template(x)
        variable = any(isinstance(y, (TensorNumber, Template)) for y in template.parts)
        return template if variable else x


class _Recording(threading.local):
    by: Recorder | None = None


_recording = _Recording()


def start_recorded(launch: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Start a kernel by `launch(*args)`, as a step of the call that is being recorded, if any."""
    if _recording.by is None:
        return launch(*args)
    with torch._C.DisableTorchFunction():  # Triton's interpreter calls torch
        compiled = launch(*args)
    _recording.by.add(launch, args, {})
    return compiled


def do_not_record() -> None:
    """Give up the record of the current call, if it is being recorded."""
    if _recording.by is not None:
        _recording.by.complete = False


class Records:
    """The records of the calls of a function, by what they depend on."""

    def __init__(self) -> None:
        self._by_kind: dict[tuple[Any, ...], Record | str] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], *others: Any) -> Any:
        """Return `function(*args)`, by the steps of an earlier call if there was one.

        What the function does may depend on the layouts of the tensors among `args`, on the other
        `args` and on `others`, which are hashable, and on `_settings`.
        """
        kind: list[Any] = [*others]
        tensors: list[Tensor] = []
        if _recording.by is not None or not _describe(args, kind, tensors):
            return function(*args)
        of = (*kind, *_settings(tensors[0]))
        record = self._by_kind.get(of)
        if type(record) is Record:
            return record.repeat(tensors)
        if record is None:
            if len(self._by_kind) >= MOST_RECORDS:
                self._by_kind.clear()
            self._by_kind[of] = SEEN
        if record is not SEEN or not _can_record(tensors):
            return function(*args)
        with Recorder(tensors) as recorder:
            _recording.by = recorder
            try:
                result = function(*args)
            finally:
                _recording.by = None
            self._by_kind[of] = recorder.record(result) or NOT_RECORDABLE
        return result


def replayed(function: Function) -> Function:
    """Let later calls of a function repeat the steps of an earlier one, as `Records.call`."""
    records = Records()

    @wraps(function)
    def call(*args: Any) -> Any:
        return records.call(function, args)

    return call  # type: ignore[return-value]  # the signature of `function`


def _describe(args: Sequence[Any], kind: list[Any], tensors: list[Tensor]) -> bool:
    """Add the tensors among the arguments to `tensors`, and their layouts and the other arguments
    to `kind`. Return whether all tensors are plain."""
    for x in args:
        if type(x) in PLAIN_TYPES:
            tensors.append(x)
            aligned = x.data_ptr() % 16 == 0
            kind.append((x.shape, x.stride(), x.dtype, aligned, x.is_neg(), x.requires_grad))
        elif isinstance(x, tuple):
            kind.append(type(x))
            if not _describe(x, kind, tensors):
                return False
        elif isinstance(x, Tensor):
            return False
        else:
            kind.append(x)
    return True


def _settings(x: Tensor) -> tuple[Any, ...]:
    """Return the device, and the settings of torch that decide which kernels compute a call."""
    return (
        x.device,
        x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision,
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_deterministic_algorithms(),
    )


def _can_record(tensors: list[Tensor]) -> bool:
    """Return whether the arguments are different objects, and only the recorder intercepts the
    functions of torch."""
    alone = torch._C._is_torch_function_enabled() and torch._C._len_torch_function_stack() == 0
    return alone and len(set(map(id, tensors))) == len(tensors)


def _tensors(x: Any) -> list[Tensor]:
    """Return the tensors that a function of torch returned."""
    if isinstance(x, Tensor):
        return [x]
    return [y for y in x if isinstance(y, Tensor)] if isinstance(x, (tuple, list)) else []


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current, because kernels start on the current device."""
    if not x.is_cuda or torch.cuda.current_device() == x.get_device():
        return nullcontext()
    return torch.cuda.device(x.get_device())
