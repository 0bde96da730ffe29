"""Read a mask from text: what a mask prints, it can be made from. Nothing else is evaluated."""

import ast

from ..errors import AttentionError, BadValue
from .given import dense, documents
from .mask import Mask
from .positions import Causal, causal, everything, lengths, prefix, window

NAMES: dict[str, Mask] = {"everything": everything, "causal": causal}
CALLS = {
    "Causal": Causal,
    "window": window,
    "prefix": prefix,
    "lengths": lengths,
    "documents": documents,
    "dense": dense,
}


def parse(text: str) -> Mask:
    """A mask from its own notation, for example ``"causal & window(before=3, after=0)"``.

    ``parse(repr(mask)) == mask``. Raises `BadValue` for anything that is not a mask.
    """
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body)
    except AttentionError:
        raise
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise BadValue(
            f"The mask {text if len(text) < 80 else text[:80] + '…'!r} cannot be read.",
            f"a mask is made of {', '.join([*NAMES, *(f'{c}(...)' for c in CALLS)])}, "
            "joined by &, | and ~.",
            "write for example 'causal' or 'causal & window(before=3, after=0)'.",
        ) from error


def _mask(node: ast.expr) -> Mask:
    match node:
        case ast.Name(id=name):
            return NAMES[name]
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if all(
            k.arg for k in keywords
        ):
            given = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
            return CALLS[name](*(ast.literal_eval(a) for a in args), **given)  # type: ignore[operator]  # a class or a function
    raise ValueError(ast.dump(node))
