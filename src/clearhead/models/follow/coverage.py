"""Warn of attention modules that computed attention without clearhead."""

import dis
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from torch import nn

from ...core.functional.ambient import THROUGH_CLEARHEAD
from ...hf.inspect_model import calls_interface, computes_attention, functions_of, names_in

_NAMED = 4  # modules that a warning names
_PRODUCTS = {
    "matmul", "bmm", "baddbmm", "einsum",
    "scaled_dot_product_attention", "multi_head_attention_forward",
}  # fmt: skip


@lru_cache(maxsize=1024)
def attends(kind: type[nn.Module]) -> bool:
    """Return whether every module of this class computes attention weights when it runs.

    The code of a class shows it: it calls transformers' attention interface, or "Attention" is in
    its name, and it computes products of matrices and a softmax. So this is False for linear
    attention, convolutions, and gates with a softmax.
    """
    if calls_interface(kind):
        return True
    return computes_attention(kind) and any(
        names_in(function) & _PRODUCTS
        or any(step.argrepr == "@" for step in dis.get_instructions(function))
        for function in functions_of(kind)
    )


def left_out(missed: Mapping[str, type[nn.Module]]) -> str:
    """Name the modules that computed attention without clearhead, from their names and classes."""
    names = [name or "the model itself" for name in missed]
    some = [*names[:_NAMED], f"{len(names) - _NAMED} more"] if len(names) > _NAMED else names
    return f"{', '.join(some)} ({', '.join({kind.__name__: 0 for kind in missed.values()})})"


def warn_if_missed(
    verb: str, missed: Mapping[str, type[nn.Module]], layers: Sequence[int | str | None] = (None,),
    *, stacklevel: int,
) -> None:  # fmt: skip
    """Warn that `verb` leaves out modules that computed attention without clearhead.

    `layers` selects some of them by patterns. None selects all, and so does a number, because
    layers are numbered without them.
    """
    selected = {
        name: kind
        for name, kind in missed.items()
        if any(not isinstance(which, str) or fnmatchcase(name, which) for which in layers)
    }
    if selected:
        warnings.warn(
            f"{verb} leaves out {left_out(selected)}, which computed attention without clearhead. "
            f"Layers are numbered without them. To include them, {THROUGH_CLEARHEAD}",
            stacklevel=stacklevel + 1,
        )
