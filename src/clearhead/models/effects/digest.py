"""Compute digests of values by their content, which are the same in every run of Python."""

import functools
import hashlib
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import kind_of
from ...core.masks import Mask
from ..inspect.edits import Edit
from ..inspect.recording import Call, Recording
from .user_code import follows_from_arguments, module_of, references, release, replaced_members

_PLAIN = (
    bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_LISTS = (list, tuple, torch.Size, deque)
_DICTS = (dict, OrderedDict, defaultdict, Counter, types.MappingProxyType)
_OF_CLASSES = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.MemberDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip
# Members of a class that follow from others, or change no number.
_DERIVED = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__", "_abc_impl",
    "__dataclass_fields__", "__dataclass_params__", "__parameters__", "__orig_bases__",
    "__slotnames__",
}  # fmt: skip
# Attributes of transformers that change no number: where a model came from, and a hash of a run.
_ORIGIN = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version",
           "_original_object_hash"}  # fmt: skip


class Undigested(Exception):
    """The reason why a value has no digest: it has `what`, at `where`, whose content is unknown."""

    def __init__(self, what: str, where: str = "") -> None:
        self.what, self.where = what, where
        super().__init__(f"{where} is {what}" if where else f"it is {what}")


class _ModuleClass(NamedTuple):
    """The class of a module that exists, so that its `__init__` has run."""

    kind: type


_TUPLE_FIELD = type(vars(_ModuleClass)["kind"])  # of the fields of named tuples


class Digests:
    """Digests of values whose content is known completely. Raises `Undigested` for any other.

    These are numbers, texts, tensors and arrays; lists, sets and dicts; functions and classes; and
    objects that consist of their attributes, such as modules, edits, masks and recordings. The
    digest of an object includes that of its class. That of a function or a class has its code, and
    all that the code refers to, in other modules too. Code of installed packages is identified by
    its name and release.
    """

    def __init__(self) -> None:
        # By id, with a reference that keeps the id valid. Values that refer to each other are a
        # cycle; the digest of each is that from itself on, so it does not serve inside the cycle.
        self._known: dict[int, tuple[object, str, frozenset[int]]] = {}
        self._open: dict[int, tuple[object, str, int]] = {}  # and the depth where its cycle begins
        self._running: dict[int, int] = {}  # the depth of each value that is read now
        self._begins = 0
        self._module_classes: dict[type, _ModuleClass] = {}

    def of(self, value: object) -> str:
        key, depth = id(value), len(self._running)
        if key in self._known and self._known[key][2].isdisjoint(self._running):
            return self._known[key][1]
        if key in self._running:
            self._begins = min(self._begins, self._running[key])
            return f"{depth - self._running[key]} levels up"
        if key in self._open:
            _, digest, begins = self._open[key]
            self._begins = min(self._begins, begins)
            return digest
        before, self._begins = self._begins, depth
        self._running[key] = depth
        try:
            digest = _hash(type(value), self._parts(value))
        except RecursionError:
            raise Undigested(f"{_name(value)}, which is nested too deeply") from None
        except Undigested:
            self._open.clear()
            raise
        finally:
            del self._running[key]
        if self._begins == depth:
            cycle = {k for k, (*_, begins) in self._open.items() if begins >= depth}
            self._known[key] = value, digest, frozenset({key, *cycle} if cycle else ())
            self._open = {k: x for k, x in self._open.items() if k not in cycle}
        else:
            self._open[key] = value, digest, self._begins
        self._begins = min(before, self._begins)
        return digest

    def _parts(self, value: Any) -> Iterator[bytes | memoryview]:
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
            if value.is_meta or not dense:
                what = "on the meta device" if value.is_meta else "not dense"
                raise Undigested(f"a tensor {tuple(value.shape)} {what}")
            yield from _content(value)
        elif kind in _PLAIN:
            yield repr(value).encode()
        elif (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
            yield f"{value.shape} {value.dtype}".encode() + value.tobytes()
        elif kind in _LISTS:
            yield from map(self._encoded, value)
        elif kind in _DICTS:
            yield from map(self._encoded, value.items())
            if kind is defaultdict:
                yield self._encoded(value.default_factory)
        elif kind in (set, frozenset):  # in an order that differs between processes
            yield from sorted(map(self._encoded, value))
        elif kind is slice:
            yield from map(self._encoded, (value.start, value.stop, value.step))
        elif kind is re.Pattern:
            yield from map(self._encoded, (value.pattern, value.flags))
        elif kind is types.FunctionType:
            yield from self._of_function(value)
        elif kind is types.CodeType:
            yield from self._of_code(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif isinstance(value, types.ModuleType):
            members = {n: x for n, x in vars(value).items() if not n.startswith("__")}
            yield from self._of_package(value.__name__)
            if release(value.__name__) is None:
                yield from self._named(value, members.items())
        elif kind is types.BuiltinFunctionType:
            yield f"{value.__module__}.{value.__qualname__}".encode()
            if not isinstance(value.__self__, types.ModuleType | None):
                yield self._encoded(value.__self__)  # a method of an object
            elif release(module_of(value)) is None:
                raise Undigested("compiled code")
        elif kind is _TUPLE_FIELD:
            yield self._encoded(value.__reduce__()[1])
        elif kind in _OF_CLASSES:
            yield f"{value.__objclass__.__module__}.{value.__qualname__}".encode()
        elif kind is types.MethodType:
            yield from map(self._encoded, (value.__self__, value.__func__))
        elif kind in (staticmethod, classmethod):
            yield self._encoded(value.__func__)
        elif kind is property:
            yield from map(self._encoded, (value.fget, value.fset, value.fdel))
        elif kind is functools.partial:
            yield from map(self._encoded, (value.func, value.args, value.keywords, vars(value)))
        elif isinstance(value, Enum):
            yield value.name.encode() + self._encoded(kind)
        elif kind is _ModuleClass:
            yield from self._of_class(value.kind, has_run=True)
        else:
            is_module = isinstance(value, nn.Module)
            yield self._encoded(self._module_class(kind) if is_module else kind)
            yield from self._named(value, _attributes(value).items())

    def _encoded(self, value: object) -> bytes:
        return self.of(value).encode()

    def _module_class(self, kind: type) -> _ModuleClass:
        return self._module_classes.setdefault(kind, _ModuleClass(kind))

    def _named(self, owner: object, members: Iterable[tuple[str, object]]) -> Iterator[bytes]:
        """Yield names and digests. The reason why one has no digest gets the name."""
        for name, member in members:
            try:
                yield f"{name} {self.of(member)} ".encode()
            except Undigested as error:
                where = error.where or f"{name} of {_name(owner)}"
                raise Undigested(error.what, where) from error

    def _of_package(self, module: str) -> Iterator[bytes]:
        """Yield what identifies an installed module: also its functions that a user replaced."""
        yield f"{module} {release(module)}".encode()
        if release(module) is not None and module in sys.modules:
            yield from self._named(module, replaced_members(sys.modules[module]))

    def _of_function(self, function: types.FunctionType) -> Iterator[bytes]:
        yield self._encoded(function.__code__)
        yield from map(self._encoded, (function.__defaults__, function.__kwdefaults__))
        yield self._encoded(vars(function))
        module = module_of(function)
        if release(module) is not None:
            yield function.__qualname__.encode()
            yield from self._of_package(module)
            names = function.__code__.co_freevars
            cells = (cell.cell_contents for cell in function.__closure__ or ())
            yield from self._named(function, zip(names, cells, strict=True))
            return
        yield from self._named(function, self._referred(function))

    def _referred(self, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        for name, value in references(function):
            if isinstance(value, types.ModuleType):  # its members that may be read follow
                yield name, f"{value.__name__} {release(value.__name__)}"
                continue
            is_code = isinstance(value, types.FunctionType | types.BuiltinFunctionType | type)
            is_installed = is_code and release(module_of(value)) is not None
            if is_installed and not follows_from_arguments(value):
                what = f"{module_of(value)}.{_name(value)}, which may read more than its arguments"
                raise Undigested(what, f"{name} of {_name(function)}")
            yield name, value

    def _of_code(self, code: types.CodeType) -> Iterator[bytes]:
        yield code.co_code + getattr(code, "co_exceptiontable", b"")
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        yield from map(self._encoded, (code.co_consts, names, counts))

    def _of_class(self, kind: type, has_run: bool = False) -> Iterator[bytes]:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        bases = [self._module_class(x) if has_run else x for x in kind.__bases__]
        yield from map(self._encoded, (type(kind), *bases))
        if release(kind.__module__) is None:
            members = {n: x for n, x in vars(kind).items() if n not in _DERIVED}
            if has_run and isinstance(function := members.get("__init__"), types.FunctionType):
                members["__init__"] = function.__code__
            yield from self._named(kind, members.items())
        else:
            yield from self._of_package(kind.__module__)
            yield from self._named(kind, replaced_members(kind))


def weights_digest(model: nn.Module) -> str:
    """Compute a digest of the tensors of a model by name, and of the name of its class."""
    tensors = {n: x for n, x in model.state_dict().items() if isinstance(x, Tensor)}
    names = (_hash(str, [repr(name).encode()]).encode() for name in tensors)
    contents = (_hash(type(x), _content(x)).encode() for x in tensors.values())
    items = (_hash(tuple, item).encode() for item in zip(names, contents, strict=True))
    return _hash(type(model), [_hash(OrderedDict, items).encode()])


def _hash(kind: type, parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} ".encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def _content(x: Tensor) -> Iterator[bytes | memoryview]:
    """Yield the shape, dtype and bytes of a tensor; a meta tensor has no bytes."""
    yield f"{tuple(x.shape)} {x.dtype}".encode()
    if not x.is_meta:
        resolved = x.detach().resolve_conj().resolve_neg()
        yield resolved.cpu().reshape(-1).view(torch.uint8).numpy().data


def _attributes(value: Any) -> dict[str, object]:
    """Return the attributes of an object, if it consists of them alone.

    Raises `Undigested` for an object that pickle does not store by its attributes.
    """
    kind = type(value)
    if isinstance(value, Edit | Mask | Recording | Call):
        # Private attributes of clearhead's own classes derive from the others.
        own = [base for base in kind.__mro__ if base.__module__.startswith("clearhead.")]
        known = {name for base in own for name in vars(base).get("__annotations__", ())}
        return {
            name: x
            for name, x in vars(value).items()
            if name[:1] != "_" or not (kind in own or name in known)
        }
    if isinstance(value, nn.Module) and kind.__reduce_ex__ is object.__reduce_ex__:
        attributes = _with_numbered_hooks(vars(value))
    else:
        attributes = _pickled(value)
    if kind.__module__.startswith("transformers."):
        return {name: x for name, x in attributes.items() if name not in _ORIGIN}
    return attributes


def _pickled(value: Any) -> dict[str, object]:
    kind = type(value)
    own_state = getattr(kind, "__getstate__", None)
    default = own_state is getattr(object, "__getstate__", None)
    is_known = default or release(module_of(own_state)) is not None  # as of dataclasses with slots
    if kind.__reduce__ is not object.__reduce__ or not is_known:
        raise Undigested(kind_of(value))
    try:
        parts: Any = object.__reduce_ex__(value, 2)
    except TypeError:  # it has parts that Python does not see
        raise Undigested(kind_of(value)) from None
    _, (_, *content), state, items, _ = parts
    pairs = [*dict.items(value)] if isinstance(value, dict) else []
    attributes: dict[str, object] = {"": (content, [*(items or ())], pairs)}
    for part in state if isinstance(state, tuple) else (state,):
        named = enumerate(part) if isinstance(part, list) else (part or {}).items()
        attributes |= {str(name): x for name, x in named}
    return attributes


def _with_numbered_hooks(attributes: dict[str, Any]) -> dict[str, object]:
    """Number the hooks of a module from 0; torch numbers all hooks of a process."""
    tables = {name: x for name, x in attributes.items() if isinstance(x, dict) and "hooks" in name}
    hooks = {name: x for name, x in tables.items() if all(isinstance(key, int) for key in x)}
    ids = sorted({key for x in hooks.values() for key in x})
    for name, x in hooks.items():
        attributes = {**attributes, name: {ids.index(key): hook for key, hook in x.items()}}
    return attributes


def _name(value: object) -> str:
    return getattr(value, "__qualname__", None) or kind_of(value)
