"""Compute digests of values by their content, which are the same in every run of Python."""

import functools
import hashlib
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..masks import Mask
from .edits import Edit
from .recording import Call, Recording

PLAIN = (
    bool, int, float, str, bytes, range, Path, type(None), type(Ellipsis), slice,
    torch.dtype, torch.device,
)  # fmt: skip
NAMED = (type, types.BuiltinFunctionType)  # the same name is the same thing


class Digests:
    """Digests of numbers, tensors, modules, edits, masks, recordings, functions, and lists, sets
    and dicts of them. Any other value gets a new digest each time, so it never equals an earlier
    one.

    The digest of a function covers its code, its defaults, and the variables that it refers to.
    Functions of other modules are identified by name. Each object is read once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}  # the reference keeps the id valid

    def of(self, value: object) -> str:
        if id(value) not in self._known:
            self._known[id(value)] = value, "itself"  # for a function that refers to itself
            digest = hashlib.sha256(
                f"{type(value).__module__}.{type(value).__qualname__} ".encode()
            )
            for part in self._parts(value):
                digest.update(part)
            self._known[id(value)] = value, digest.hexdigest()[:16]
        return self._known[id(value)][1]

    def _parts(self, value: object) -> Iterator[bytes | memoryview]:
        if isinstance(value, Tensor):
            yield f"{tuple(value.shape)} {value.dtype}".encode()
            if not value.is_meta:
                yield value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data
        elif isinstance(value, PLAIN):
            yield repr(value).encode()
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else value
            for item in items:
                yield self.of(item).encode()
        elif isinstance(value, set | frozenset):  # in an order that differs between processes
            for digest in sorted(self.of(item) for item in value):
                yield digest.encode()
        elif isinstance(value, nn.Module):
            yield self.of(value.state_dict()).encode()
        elif isinstance(value, types.FunctionType):
            yield from self._parts_of(value)
        elif isinstance(value, types.MethodType):
            yield (self.of(value.__self__) + self.of(value.__func__)).encode()
        elif isinstance(value, functools.partial):
            yield (self.of(value.func) + self.of(value.args) + self.of(value.keywords)).encode()
        elif isinstance(value, types.CodeType):
            yield value.co_code
            yield self.of((value.co_consts, value.co_names)).encode()
        elif isinstance(value, types.ModuleType):
            yield value.__name__.encode()
        elif isinstance(value, NAMED):
            yield f"{value.__module__}.{value.__qualname__}".encode()
        elif isinstance(value, Edit | Mask | Recording | Call):
            for name, part in vars(value).items():
                if not name.startswith("_"):  # private attributes derive from the others
                    yield f"{name} {self.of(part)} ".encode()
        else:
            yield os.urandom(16)

    def _parts_of(self, function: types.FunctionType) -> Iterator[bytes]:
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        used = {n: function.__globals__[n] for n in _names(function.__code__)
                if n in function.__globals__}  # fmt: skip
        for value in (
            function.__code__,
            function.__defaults__,
            function.__kwdefaults__,
            *cells,
            *used.values(),
        ):
            other = (
                isinstance(value, types.FunctionType) and value.__module__ != function.__module__
            )
            name = f"{value.__module__}.{value.__qualname__}" if other else ""
            importable = other and "<" not in name
            yield (name if importable else self.of(value)).encode()


def _names(code: types.CodeType) -> list[str]:
    """Return the global names that code may refer to, including those in nested functions."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return list(dict.fromkeys([*code.co_names, *(name for x in inner for name in _names(x))]))
