"""Read a mask from its notation, which is its repr, without evaluating other code."""

import ast
import inspect
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import AttentionError, BadValue, did_you_mean, must_be_of
from .data import dense, documents
from .mask import Mask
from .positions import Causal, causal, everything, lengths, prefix, window

Item = TypeVar("Item")

NAMES: dict[str, Mask] = {"everything": everything, "causal": causal}
CALLS: dict[str, Callable[..., Mask]] = {
    make.__name__: make for make in (Causal, window, prefix, lengths, documents, dense)
}


def parse(text: str) -> Mask:
    """Read a mask from its notation, for example ``"causal & window(before=3, after=0)"``.

    ``parse(repr(mask)) == mask``, except for a mask of more than 4096 cells or numbers, whose repr
    shows only their shape. Raises `BadValue` for a string that is not a mask, and `BadType` for
    other types.
    """
    rule = "parse reads a string, such as the repr of a mask."
    hint = "pass a string, for example 'causal & window(before=3, after=0)'."
    must_be_of(str, "parse", text, rule, hint)
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body)
    except AttentionError:
        raise
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        gave = f"The mask {text if len(text) < 80 else text[:80] + '…'!r} cannot be read: {why}."
        rule = f"it joins {', '.join([*NAMES, *(f'{c}(...)' for c in CALLS)])} by &, | and ~."
        hint = "write for example 'causal' or 'causal & window(before=3, after=0)'."
        raise BadValue(gave, rule, hint) from error


def _mask(node: ast.expr) -> Mask:
    match node:
        case ast.Name(id=name):
            return _named(name, NAMES)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(
            k.arg for k in keywords
        ):
            named = {str(k.arg): _literal(k.value) for k in keywords}
            if len(named) < len(keywords):
                raise ValueError(f"{name}(...) has a keyword twice")
            make = _named(name, CALLS)
            _must_be_known(name, make, named)
            return make(*map(_literal, args), **named)
        case ast.BoolOp():
            raise ValueError("rules are joined by & and |, not by `and` and `or`")
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not a mask")


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"{ast.unparse(node)[:40]!r} is not a number") from None


def _must_be_known(name: str, make: Callable[..., Mask], keywords: Iterable[str]) -> None:
    parameters = inspect.signature(make).parameters
    known = [name for name, x in parameters.items() if x.kind is not x.VAR_POSITIONAL]
    for keyword in keywords:
        if keyword not in known:
            hint = did_you_mean(keyword, known) or f"it takes {', '.join(known)}"
            raise ValueError(f"{name} has no {keyword!r} ({hint})")


def _named(name: str, known: dict[str, Item]) -> Item:
    if name in known:
        return known[name]
    if name in CALLS:
        raise ValueError(f"{name!r} needs its numbers: {name}(...)")
    if name in NAMES:
        raise ValueError(f"{name!r} takes no numbers")
    near = did_you_mean(name, [*NAMES, *CALLS])
    raise ValueError(f"no mask is called {name!r}" + (f" ({near})" if near else ""))
