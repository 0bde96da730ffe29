"""Errors in three parts: what you gave, the rule, and a hint.

And the checks of arguments: dense tensors, whole numbers, positions, numbers, a folder to write to.
"""

import difflib
import inspect
import math
import operator
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import torch


class AttentionError(Exception):
    """The base of every error clearhead raises on purpose.

    It is never raised itself: each one is a `BadValue` (also a `ValueError`) or
    a `BadType` (also a `TypeError`), so code that knows nothing of clearhead can
    catch it too. The three parts stay apart as `gave`, `rule` and `hint`.
    """

    def __init__(self, gave: str, rule: str, hint: str) -> None:
        self.gave, self.rule, self.hint = gave, rule, hint

    def __str__(self) -> str:
        return f"{self.gave}\n  Rule: {self.rule}\n  Hint: {self.hint}"

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.gave, self.rule, self.hint)


def kind_of(x: object) -> str:
    """What a value is, with its article: ``an int``, ``a list``, ``None``."""
    name = type(x).__name__
    return "None" if x is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"


RENAMED = {"map": "pooled", "rows": "exact_rows"}  # statistics, in version 0.2


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Suggest a known name for a misspelt or an old one: ``did you mean 'entropy'?``, or ""."""
    known = list(known)
    if (new := RENAMED.get(str(name))) in known:
        return f"did you mean {new!r}?"
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]!r}?" if near else ""


def why_failed(error: Exception) -> str:
    """What the system says of a file that failed, without its number; else the error itself."""
    return str(getattr(error, "strerror", None) or error)


class BadValue(AttentionError, ValueError):
    """A value, a shape or a size that the rule does not allow."""


class Missing(BadValue, ImportError):
    """A library that is asked for and not installed."""


class BadType(AttentionError, TypeError):
    """An argument of a kind (a type or a dtype) that the rule does not allow."""


@cache  # an engine that lacks its library may be asked at each call
def how_to_install(extra: str) -> str:
    """The command that installs what an optional part of clearhead needs, into this Python: the
    libraries by name, so that it works wherever clearhead itself came from."""
    try:
        required = metadata.requires("clearhead") or []
    except metadata.PackageNotFoundError:  # run from its sources, uninstalled
        required = []
    parts = (line.replace("'", '"').partition(";") for line in required)
    needed = [name.strip() for name, _, where in parts if f'extra == "{extra}"' in where]
    return shlex.join(
        [sys.executable, "-m", "pip", "install", *(needed or [f"clearhead[{extra}]"])]
    )


def refuse_keywords(call: Callable[..., object], unknown: Mapping[str, object]) -> NoReturn:
    """Raises `BadType` for the first of the keywords that `call` does not know; those of torch's
    function are told their names here."""
    verb = call.__name__
    parameters = inspect.signature(call).parameters.values()
    *others, last = (x.name for x in parameters if x.kind is x.KEYWORD_ONLY)
    name, value = next(iter(unknown.items()))
    shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    gave = f"{verb} got {name}={shown}."
    if name in ("attn_mask", "is_causal", "dropout_p", "enable_gqa"):
        raise BadType(
            gave,
            "that is a keyword of torch's scaled_dot_product_attention. Here a mask is mask=, a "
            "matrix that is added bias=, dropout is dropout=, and grouped heads need no flag.",
            "pass mask=clearhead.causal or mask=clearhead.dense(keep=...), or call "
            "clearhead.compat.scaled_dot_product_attention, which takes torch's keywords.",
        )
    raise BadType(
        gave,
        f"it takes {', '.join(others)} and {last}.",
        did_you_mean(name, [*others, last]) or f"see help(clearhead.{verb}).",
    )


def must_be_strided(name: str, x: torch.Tensor, rule: str = "", if_nested: str = "") -> None:
    """Raises `BadType` for a tensor that is nested, sparse or of another layout without strides.
    `rule` and the hint of a nested one may be said in other words."""
    if x.is_nested or x.layout is not torch.strided:
        raise BadType(
            f"{name} is {'nested' if x.is_nested else f'of layout {x.layout}'}.",
            rule or f"{name} is a dense tensor with strides.",
            if_nested or f"pass it padded, as {name}.to_padded_tensor(0) gives it."
            if x.is_nested
            else f"pass {name}.to_dense().",
        )


def whole_number(value: object) -> int | None:
    """`value` as an int if Python can count with it (an int, NumPy's, a tensor of one); else None.

    A boolean says yes or no, and is none.

    >>> whole_number(3), whole_number(3.0), whole_number(True)
    (3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, str, list, tuple)) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it says what is none
    except TypeError:
        return None


def as_count(
    name: str, value: object, rule: str, hint: str, least: int = 0, most: int | None = None
) -> int:
    """`value` as an int from `least` to `most` (None: any). Else raises, with `name`, the rule and
    the hint: `BadType` for what is no whole number, `BadValue` for one out of range."""
    whole = whole_number(value)
    if whole is None:
        raise BadType(f"{name}={value!r}.", rule, hint)
    if whole < least or (most is not None and whole > most):
        raise BadValue(f"{name}={value!r}.", rule, hint)
    return whole


def as_index(what: str, value: object, size: int, rule: str, hint: str) -> int:
    """`value` as a position from 0 to `size` - 1, where -1 is the last. Else raises, as `as_count`
    does; `what` says what was asked for."""
    whole = whole_number(value)
    if whole is None:
        raise BadType(f"{what} {value!r} was asked for.", rule, hint)
    if not -size <= whole < size:
        raise BadValue(f"{what} {value!r} was asked for.", rule, hint)
    return whole % size


def as_number(
    name: str,
    value: object,
    rule: str,
    hint: str,
    allowed: Callable[[float], bool] = lambda x: -math.inf < x < math.inf,
) -> float:
    """`value` as a float that is `allowed`. Else raises, as `as_count` does.

    A text or a boolean is no number, although `float` would read one into it. Only comparisons say
    what is finite, so that a graph may hold a number that changes from call to call.
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        found = float(value)  # type: ignore[arg-type]  # it says what is none
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadType(f"{name}={value!r}.", rule, hint) from error
    if not allowed(found):
        raise BadValue(f"{name}={value!r}.", rule, hint)
    return found


def writable_folder(path: str | Path, what: str, way: str = "pass another folder.") -> Path:
    """The folder of that name, made if need be. `what` will be written there, and `way` says how to
    name another one. Raises `BadValue` if it cannot be made or written to."""
    made, fails = Path(path), "cannot be made"
    try:
        made.mkdir(parents=True, exist_ok=True)
        fails = "cannot be written to"
        trial = made / f".trial.{os.getpid()}"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise BadValue(
            f"The folder {str(path)!r} {fails}: {error.strerror}.",
            f"{what} written to a folder.",
            way,
        ) from error
    return made
