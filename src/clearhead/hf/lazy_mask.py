"""Boolean mask tensors for transformers whose cells are computed only when they are read.

A full mask has Tq x Tk booleans, 1 GB for 32k tokens. Most models only pass their mask to the
attention function, and a `LazyMask` carries a clearhead `Mask` there. Only if a model slices it,
combines it or writes to it, its cells are computed, as a `BooleanMask`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..core.errors import BadValue
from ..core.functional.ambient import UNKNOWN_POSITION
from ..core.masks import Mask, dense

# Functions that do not need the cells.
_METADATA = {
    *(
        getattr(Tensor, n).__get__
        for n in ("shape", "dtype", "device", "ndim", "requires_grad", "_base")
    ),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]  # a property of C
    Tensor.size,
    Tensor.dim,
    Tensor.stride,
    Tensor.storage_offset,
}

# The names of functions of torch, and of methods of its tensors.
_ADD = {"add", "__add__", "__radd__"}
# They would take True as a 1, or as "masked".
_MISREAD = {"add_", "__iadd__", "masked_fill", "masked_fill_"}
# They return a tensor whose True may mean "masked".
_NEGATE = {"__invert__", "logical_not", "bitwise_not", "__eq__", "__ne__"}


class BooleanMask(Tensor):
    """A boolean mask, True = may look, that can be added to numbers.

    Eager models have masks of 0 and a large negative number, and add them to a bias (BEiT) or to
    scores. Booleans would count as 1 and 0 there, so ``numbers + mask`` is -inf where the mask is
    False. Other operations that would misread booleans raise `BadValue`.
    """

    position = UNKNOWN_POSITION  # of the call in the text

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        numbers, name = None, func.__name__
        if name in _ADD | _MISREAD:
            tensors = [x for x in args[:2] if isinstance(x, Tensor)]
            numbers = next((x for x in tensors if x.is_floating_point()), None)
        if numbers is not None and name in _ADD:
            (keep,) = (x.as_subclass(Tensor) for x in tensors if isinstance(x, BooleanMask))
            return numbers.masked_fill(~keep, float("-inf"))
        if numbers is not None:
            gave = f"The model calls {name} on its scores with a boolean mask."
            rule = "clearhead's masks are True where a query may look, and are not numbers."
            hint = "load it with attn_implementation='eager', as it computes attention itself."
            raise BadValue(gave, rule, hint)
        result = super().__torch_function__(func, types, args, kwargs)
        if not isinstance(result, BooleanMask):
            return result
        if result.dtype != torch.bool or name in _NEGATE:
            return result.as_subclass(Tensor)
        if isinstance(args[0], BooleanMask | LazyMask):
            result.position = args[0].position
        return result


class LazyMask(Tensor):
    """A boolean mask, (B, 1, Tq, Tk), that stores a `Mask` instead of its cells.

    Writing to it changes the stored mask; slices are copies.
    """

    mask: Mask
    position = UNKNOWN_POSITION  # of the call in the text
    each_alone: tuple[Mask, Tensor, Mask]  # set by `attention` for packed texts

    @staticmethod
    def of(mask: Mask, B: int, Tq: int, Tk: int, device: torch.device) -> "LazyMask":
        cell = torch.ones((), dtype=torch.bool, device=device)
        lazy = cell.expand(B, 1, Tq, Tk).as_subclass(LazyMask)
        lazy.mask = mask
        return lazy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
        # A static cache and a checkpoint with use_reentrant=True call these. A LazyMask has no
        # layout and no gradient.
        if func in (Tensor.contiguous, Tensor.detach):
            return args[0]
        if isinstance(kwargs.get("out"), LazyMask):
            rule = "clearhead's masks for transformers have no memory to write to."
            hint = "clone the mask first: mask = mask.clone()."
            raise BadValue(f"torch.{func.__name__} got a mask as out=.", rule, hint)
        plain, named = tree_map_only(LazyMask, _computed, (args, kwargs))
        if not (args and isinstance(args[0], LazyMask) and _may_write(func)):
            return func(*plain, **named)
        written = plain[0].clone()
        before = written._version
        result = func(written, *plain[1:], **named)
        if written._version == before:  # requires_grad_ and the like
            return result
        args[0].mask = dense(keep=written.as_subclass(Tensor))
        return args[0]

    def as_subclass(self, cls: Any) -> Any:
        return _computed(self).as_subclass(cls)


def _computed(x: LazyMask) -> Tensor:
    """Compute the cells of a lazy mask."""
    B, _, Tq, Tk = x.shape
    keep = x.mask.to_bool(Tq, Tk, B=B, device=x.device)
    cells = keep.expand(B, 1, Tq, Tk).as_subclass(BooleanMask)
    cells.position = x.position
    return cells


def _may_write(func: Callable[..., Any]) -> bool:
    """Return whether this torch function may write to its first argument."""
    name = func.__name__
    return name in ("__setitem__", "__iand__", "__ior__", "__ixor__") or (
        name.endswith("_") and not name.endswith("__")
    )
