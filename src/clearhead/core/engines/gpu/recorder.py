"""Record the steps of a call: the functions of torch that it calls, and the kernels that it starts.

A record is the text of a function, compiled: a line for each step. Its parameters are the tensors
of a call, and everything else is a constant. Therefore a recorded function must not read values of
tensors, or enter a mode of torch. A call is not recorded if a function of torch returns anything
but tensors or a part of their layout. It is not recorded either if a step takes a tensor that is
neither an argument nor the result of a step.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...torch_state import OwnMode

LAYOUT = {  # functions of torch that a recorded function may call without a step
    "__get__",  # a property
    "__len__", "data_ptr", "dim", "element_size", "get_device", "is_contiguous", "is_neg", "numel",
    "size", "stride",
    "_set_grad_enabled",  # a replayed call records no gradients
}  # fmt: skip
STREAM = object()  # is the current stream among the arguments of a compiled kernel


class Compiled(NamedTuple):
    """How a compiled kernel is started: by `call(*args)`, with addresses for tensors, and the
    result of `stream` for `STREAM`. `stream` returns None if a hook must see each start."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    stream: Callable[[], int | None]


class RecordedStep(NamedTuple):
    """A line of a record: a call of torch, or the start of a kernel. `writes`: perhaps to its
    arguments, so it is needed even if no later step uses its results."""

    results: list[str]
    call: str
    uses: set[str]
    writes: bool


class Recorder(OwnMode):
    """Records the call in its `with` block, as the lines of a function of Python.

    They call each tensor t0, t1, ... and each constant c0, c1, ..., so that calls which differ only
    in constants have the same text.
    """

    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        self.complete = True
        self.stream: Callable[[], int | None] | None = None
        self.steps: list[RecordedStep] = []
        self.constants: dict[str, Any] = {}
        self.tensors = list(arguments)  # kept, so that no two have the same id
        self.names = {id(x): f"t{i}" for i, x in enumerate(arguments)}
        self.parameters = ", ".join(self.names.values())

    def __enter__(self) -> "Recorder":
        _current.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _current.recorder = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        result = function(*args, **keywords)
        if _has_tensors(result) or (result is None and _has_tensors((args, keywords))):
            self.add(function, args, keywords, result)
        elif function.__name__ not in LAYOUT:
            self.complete = False
        return result

    def start(self, launch: Any, args: tuple[Any, ...]) -> None:
        """Add the start of a kernel."""
        uses: set[str] = set()
        compiled = isinstance(launch, Compiled)
        if compiled:
            self.stream = launch.stream
            launch, args = launch.call, launch.args
        texts = ", ".join(self._text(x, uses, addresses=compiled) for x in args)
        self.steps.append(RecordedStep([], f"{self._constant(launch)}({texts})", uses, True))

    def add(
        self, function: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Add a call of torch that has returned `result`."""
        uses: set[str] = set()
        texts = [self._text(x, uses) for x in args]
        texts += [f"{name}={self._text(x, uses)}" for name, x in keywords.items()]
        call = f"{self._constant(function)}({', '.join(texts)})"
        listed = result if isinstance(result, (tuple, list)) else [result]
        writes = result is None or function.__name__.endswith("_") or "out" in keywords
        if not writes and any(id(x) in self.names for x in listed):
            return  # `contiguous` of a contiguous tensor
        results = [self._named(x) for x in listed]
        if listed is result:
            call = f"({', '.join(results)},) = {call}"
        elif result is not None:
            call = f"{results[0]} = {call}"
        self.steps.append(RecordedStep(results, call, uses, writes))

    def record(self, result: Any) -> Callable[..., Any] | None:
        """Return a function that repeats the call, which returned `result`, or None if it cannot be
        repeated. The function returns None if there is no `Compiled.stream`."""
        used: set[str] = set()
        lines = [f"return {self._text(result, used)}"]
        for step in reversed(self.steps):
            if step.writes or not used.isdisjoint(step.results):
                used |= step.uses
                lines.append(step.call)
        if not self.complete:
            return None
        if self.stream is not None:
            lines += ["if stream is None: return None", f"stream = {self._constant(self.stream)}()"]
        body = "\n ".join(reversed(lines))
        exec(_compiled(f"def repeat({self.parameters}):\n {body}"), self.constants)
        repeat: Callable[..., Any] = self.constants["repeat"]
        return repeat

    def _named(self, x: Any) -> str:
        if not isinstance(x, Tensor):
            return "_"
        self.tensors.append(x)
        return self.names.setdefault(id(x), f"t{len(self.names)}")

    def _constant(self, x: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return name

    def _text(self, x: Any, uses: set[str], addresses: bool = False) -> str:
        """Return an expression for an argument or a result. With `addresses`, as a compiled kernel
        reads it: tensors are addresses, and named tuples tuples."""
        if x is STREAM:
            return "stream"
        if isinstance(x, Tensor):
            self.complete = self.complete and id(x) in self.names
            uses.add(name := self.names.get(id(x), ""))
            return f"{name}.data_ptr()" if addresses else name
        if isinstance(x, slice) and _has_tensors((x.start, x.stop, x.step)):
            self.complete = False  # torch reads the value of the tensor
        if not _has_tensors(x):
            return self._constant(x)
        if isinstance(x, dict):
            pairs = (f"{self._constant(key)}: {self._text(y, uses)}" for key, y in x.items())
            return f"{{{', '.join(pairs)}}}"
        if is_dataclass(x):  # a descriptor of a tensor
            fields = (f"{name}={self._text(y, uses)}" for name, y in vars(x).items())
            return f"{self._constant(type(x))}({', '.join(fields)})"
        parts = ", ".join(self._text(y, uses, addresses) for y in x)
        if type(x) is list:
            return f"[{parts}]"
        is_plain = addresses or type(x) is tuple
        return f"({parts},)" if is_plain else f"{self._constant(type(x))}({parts})"


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    return compile(text, "a replayed call", "exec")


def _has_tensors(x: Any) -> bool:
    if is_dataclass(x) and not isinstance(x, type):
        return _has_tensors(vars(x))
    if isinstance(x, dict):
        return any(map(_has_tensors, x.values()))
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and any(map(_has_tensors, x)))


class _Current(threading.local):
    recorder: Recorder | None = None


_current = _Current()


def start_recorded(
    launch: Callable[..., Any], args: tuple[Any, ...], compiled: Callable[[], Compiled] | None
) -> Any:
    """Start a kernel by `launch(*args)`, as a step of the call that is being recorded, if any.

    `compiled` returns how a compiled kernel is started again. None is for one that compiles at its
    start, and for Triton's interpreter; they take tensors.
    """
    if _current.recorder is None:
        return launch(*args)
    with torch._C.DisableTorchFunction():  # the interpreter calls torch
        result = launch(*args)
    _current.recorder.start(launch if compiled is None else compiled(), args)
    return result


def do_not_record() -> None:
    """Give up the record of the current call, if it is being recorded."""
    if _current.recorder is not None:
        _current.recorder.complete = False
