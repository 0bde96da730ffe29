"""Errors in three parts (what you gave, the rule, a hint), and checks of single arguments."""

import difflib
import inspect
import math
import operator
import os
import shlex
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

# What the path of a file of clearhead, of the standard library or of an installed package contains.
LIBRARIES = (
    str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "site-packages", "dist-packages",
)  # fmt: skip


class AttentionError(Exception):
    """The base class of all errors that clearhead raises on purpose.

    Every error is a `BadValue` (also a `ValueError`) or a `BadType` (also a `TypeError`), so code
    can catch it without importing clearhead. Its attributes `gave`, `rule` and `hint` hold the
    three parts.
    """

    def __init__(self, gave: str, rule: str, hint: str) -> None:
        self.gave, self.rule, self.hint = gave, rule, hint

    def __str__(self) -> str:
        return f"{self.gave}\n  Rule: {self.rule}\n  Hint: {self.hint}"

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the caller's frames and the message, without the
        frames of clearhead and of libraries in between."""
        frames = traceback.extract_tb(self.__traceback__)
        own = [x for x in frames if not any(part in x.filename for part in LIBRARIES)]
        return [*traceback.format_list(own), f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.gave, self.rule, self.hint)


def kind_of(x: object) -> str:
    """Return the name of the type of `x` with its article: ``an int``, ``a list``, ``None``."""
    name = type(x).__name__
    return "None" if x is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest a known name for a misspelt one: ``did you mean 'entropy'?``

    Returns "" if no known name is near.
    """
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]!r}?" if near else ""


def why_failed(error: Exception) -> str:
    """Return the system's message of an `OSError` without its number, or the text of the error."""
    return str(getattr(error, "strerror", None) or error)


class BadValue(AttentionError, ValueError):
    """The rule does not allow a value, a shape or a size."""


class Missing(BadValue, ImportError):
    """A library that this call needs is not installed."""


class BadType(AttentionError, TypeError):
    """The rule does not allow the type or the dtype of an argument."""


@cache  # an engine that lacks its library needs it in every call
def how_to_install(extra: str) -> str:
    """Return the command that installs the libraries of an extra into this Python.

    It names the libraries, so it does not depend on how clearhead itself was installed. If it is
    not, because it runs from its sources, the command names their folder: no release is on PyPI.
    """
    try:
        required = metadata.requires("clearhead") or []
    except metadata.PackageNotFoundError:  # clearhead runs from its sources, uninstalled
        required = []
    parts = (line.replace("'", '"').partition(";") for line in required)
    needed = [name.strip() for name, _, marker in parts if f'extra == "{extra}"' in marker]
    checkout = f"{Path(__file__).parents[4]}[{extra}]"
    return shlex.join([sys.executable, "-m", "pip", "install", *(needed or [checkout])])


@contextmanager
def needs(extra: str, rule: str) -> Iterator[None]:
    """Raise `Missing` with this rule if the block imports a library that is not installed.

    `extra` is the optional part of clearhead that requires it.
    """
    try:
        yield
    except ImportError as error:
        raise Missing(f"{error.name} is not installed.", rule, how_to_install(extra)) from error


def refuse_keywords(call: Callable[..., object], unknown: Mapping[str, object]) -> NoReturn:
    """Raise `BadType` for the first keyword that `call` does not accept.

    For a keyword of torch's function, the error names the keyword of clearhead.
    """
    verb = call.__name__
    parameters = inspect.signature(call).parameters.values()
    *others, last = (x.name for x in parameters if x.kind is x.KEYWORD_ONLY)
    name, value = next(iter(unknown.items()))
    value = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    rule = f"{verb} takes {', '.join(others)} and {last}."
    hint = did_you_mean(name, [*others, last]) or f"see help(clearhead.{verb})."
    if name in ("attn_mask", "is_causal", "dropout_p", "enable_gqa"):
        rule = "it is torch's; clearhead has mask=, bias=, dropout=, and groups heads by itself."
        hint = "pass mask=clearhead.causal or mask=clearhead.dense(keep=...), or call "
        hint += "clearhead.compat.scaled_dot_product_attention, which takes torch's keywords."
    raise BadType(f"{verb} got {name}={value}.", rule, hint)


def must_be_strided(name: str, x: torch.Tensor, rule: str = "", if_nested: str = "") -> None:
    """Raise `BadType` for a tensor that is nested, sparse or of another layout without strides.

    `rule` replaces the rule, and `if_nested` the hint for a nested tensor.
    """
    if x.is_nested or x.layout is not torch.strided:
        gave, hint = f"{name} is of layout {x.layout}.", f"pass {name}.to_dense()."
        if x.is_nested:
            gave, hint = f"{name} is nested.", if_nested or f"pad it: {name}.to_padded_tensor(0)."
        raise BadType(gave, rule or f"{name} is a dense tensor with strides.", hint)


def whole_number(value: object) -> int | None:
    """Return `value` as an int if it is an integer of Python, NumPy or torch; else None.

    A boolean is not a number here.

    >>> whole_number(3), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, str, list, tuple)) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it raises for other types
    except TypeError:
        return None


def as_count(
    name: str, value: object, rule: str, hint: str, least: int = 0, most: int | None = None
) -> int:
    """Return `value` as an int from `least` to `most` (None: no limit).

    Raises, with `rule` and `hint`, `BadType` if it is not a whole number, and `BadValue` if it is
    out of range.
    """
    count = whole_number(value)
    if count is None:
        raise BadType(f"{name}={value!r}.", rule, hint)
    if count < least or (most is not None and count > most):
        raise BadValue(f"{name}={value!r}.", rule, hint)
    return count


def as_index(
    what: str, value: object, size: int, rule: str = "", hint: str = "pass one of these."
) -> int:
    """Return `value` as a position from 0 to `size` - 1, where -1 is the last.

    Raises as `as_count` does; `what` is the thing that has this position, such as "Head".
    """
    index = whole_number(value)
    rule = rule or f"there are {size}, counted from 0; -1 is the last."
    if index is None:
        raise BadType(f"{what} {value!r} was requested.", rule, hint)
    if not -size <= index < size:
        raise BadValue(f"{what} {value!r} was requested.", rule, hint)
    return index % size


def as_number(
    name: str, value: object, rule: str, hint: str,
    allowed: Callable[[float], bool] = lambda x: -math.inf < x < math.inf,
) -> float:  # fmt: skip
    """Return `value` as a float that is `allowed`. Raises as `as_count` does.

    Strings and booleans are refused, although `float` accepts them. `allowed` only compares, so
    torch.compile can trace it with a number that changes from call to call.
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # it raises for other types
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadType(f"{name}={value!r}.", rule, hint) from error
    if not allowed(number):
        raise BadValue(f"{name}={value!r}.", rule, hint)
    return number


def must_be_among(names: Iterable[str], name: str, value: object, rule: str, hint: str) -> None:
    """Raise `BadValue` unless `value`, of the argument `name`, is one of these names."""
    if not isinstance(value, str) or value not in names:
        raise BadValue(f"{name}={value!r}.", rule, hint)


def is_iterable(value: object) -> TypeGuard[Iterable[Any]]:
    """Return whether `value` has items. A tensor without dimensions only has `__iter__`."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def as_path(name: str, path: object) -> Path:
    """Return the path of a file or folder. `name` is what got it, such as "load".

    Raises `BadType` for anything but a string or a path, and `BadValue` for one with a null byte.
    """
    rule, hint = "it takes the path of a file or folder.", 'pass for example "out/name".'
    if not isinstance(path, str | os.PathLike) or isinstance(plain := os.fspath(path), bytes):
        raise BadType(f"{name} got {kind_of(path)}.", rule, hint)
    if "\0" in plain:
        raise BadValue(f"{name} got {plain!r}, with a null byte.", rule, hint)
    return Path(plain)


def must_be_of(
    kind: type | tuple[type, ...], name: str, value: object, rule: str, hint: str
) -> None:
    """Raise `BadType` unless `value`, which `name` got, is of this kind."""
    if not isinstance(value, kind):
        raise BadType(f"{name} got {kind_of(value)}.", rule, hint)


def must_be(name: str, value: object, kind: type, made_by: str) -> None:
    """Raise `BadType` unless `value` is of this kind, which the call `made_by` returns."""
    rule, hint = f"it takes a {kind.__name__}.", f"pass the result of {made_by}."
    must_be_of(kind, name, value, rule, hint)


def writable_folder(path: str | Path, what: str, hint: str = "pass another folder.") -> Path:
    """Return a folder to write to, and create it if it does not exist.

    Raises `BadValue` if it cannot be created or written to. `what` begins the rule of this error,
    for example "statistics are", and `hint` is its hint.
    """
    folder, problem = as_path("A folder to write to", path), "cannot be created"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "cannot be written to"
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        gave = f"The folder {str(path)!r} {problem}: {error.strerror}."
        raise BadValue(gave, f"{what} written to a folder.", hint) from error
    return folder
