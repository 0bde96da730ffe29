"""The mask function that transformers calls: a rule where it can be recognised, else booleans.

transformers describes a mask by a function of positions and wants a tensor back. Written out, that
tensor is Tq x Tk booleans, 1 GB for 32k tokens. So the usual rules (causal, a sliding window, no
rule at all, each with padding) come back as a `RuleTensor`, which takes no memory. A model may
still slice it or add to it: then, and only then, it is written out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import BadValue
from ..masks import Causal, Mask, dense, everything, lengths, prefix, window

# What may be asked of a tensor without looking at its cells.
_SHAPE_ONLY = {
    *(getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad")),
    Tensor.size,
    Tensor.dim,
}


# What a model does to scores with a mask of 0 and -inf, or with one whose True means "hide".
_ON_SCORES = {
    *(getattr(Tensor, n) for n in ("add", "add_", "__add__", "__radd__", "__iadd__")),
    *(getattr(Tensor, n) for n in ("masked_fill", "masked_fill_")),
    torch.add,
    torch.masked_fill,
}
_TURNED = {
    *(getattr(Tensor, n) for n in ("__invert__", "logical_not", "bitwise_not", "__eq__", "__ne__")),
    torch.logical_not,
    torch.bitwise_not,
}


class Booleans(Tensor):
    """A mask written out. A model that puts it on scores of its own, where True would count as 1 or
    hide, does not hand its attention to the interface, and would see the future: that raises."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ON_SCORES and any(
            isinstance(x, Tensor) and x.is_floating_point() for x in args
        ):
            raise BadValue(
                "The model puts its mask on scores of its own, and the mask is booleans.",
                "clearhead answers models that hand attention to transformers' interface; this one "
                "computes it itself.",
                "load this model with attn_implementation='eager'.",
            )
        found = super().__torch_function__(func, types, args, kwargs)
        plain = isinstance(found, Booleans) and (found.dtype != torch.bool or func in _TURNED)
        return found.as_subclass(Tensor) if plain else found


class RuleTensor(Tensor):
    """Booleans (B, 1, Tq, Tk), True = may look, that stay a rule until somebody reads a cell."""

    rule: Mask

    @staticmethod
    def of(rule: Mask, B: int, Tq: int, Tk: int, device: torch.device) -> "RuleTensor":
        cell = torch.ones((), dtype=torch.bool, device=device)
        made = cell.expand(B, 1, Tq, Tk).as_subclass(RuleTensor)
        made.rule = rule
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPE_ONLY:
                return func(*args, **(kwargs or {}))
        plain = [_written_out(x) for x in args]
        return func(*plain, **{n: _written_out(x) for n, x in (kwargs or {}).items()})


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """Who may look at whom, (B, 1, Tq, Tk), True = may look.

    Query i stands at position q_offset + i, key j at kv_offset + j; `attention_mask` (B, T) is 0 on
    padding.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    start = int(q_offset)
    # A graph is made for tensors: a rule would be a Python object that it has to guard.
    graph = torch.compiler.is_compiling()
    rule = None if graph else _recognise(function, start - kv_offset, local_size)
    real = None
    if rule is not None and attention_mask is not None:
        real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        real = torch.nn.functional.pad(real, (0, kv_length - real.shape[1]))
        if not bool(real.all()):
            rule = _padding(real) if rule is everything else rule & _padding(real)
    if rule is None:
        others.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        written = sdpa_mask(
            batch_size, q_length, kv_length, start, kv_offset, function, attention_mask,
            local_size, device=device, **others,
        )  # fmt: skip
        assert isinstance(written, Tensor)
        return written if graph else written.as_subclass(Booleans)
    return RuleTensor.of(rule, batch_size, q_length, kv_length, torch.device(device))


def _recognise(function: Callable[..., Any], align: int, size: int | None) -> Mask | None:
    """The rule that a mask function follows, if it is one of the usual ones."""
    from transformers import masking_utils

    if function is masking_utils.bidirectional_mask_function:
        return everything
    if function is masking_utils.causal_mask_function:
        return Causal(align=align)
    # A sliding window is a function made of two others; whatever else is made so stays unknown.
    near, *rest = _closed_over(function, "and_masks").get("mask_functions", (None,))
    if rest != [masking_utils.causal_mask_function] or size is None or size < 1:
        return None
    if _closed_over(near, "sliding_window_overlay") != {"sliding_window": size}:
        return None
    return Causal(align=align) & window(before=size - 1, align=align)


def _closed_over(function: Any, maker: str) -> dict[str, Any]:
    """What a function that transformers' `maker` made holds; empty for any other function."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>."):
        return {}
    held = (cell.cell_contents for cell in function.__closure__)
    return dict(zip(function.__code__.co_freevars, held, strict=True))


def _padding(real: Tensor) -> Mask:
    """Which keys are real, (B, Tk), as a rule: padding at either end is a count."""
    count = real.sum(1)
    first = real.long().argmax(1)
    place = torch.arange(real.shape[1], device=real.device)
    together = (place >= first.unsqueeze(1)) & (place < (first + count).unsqueeze(1))
    if not together.equal(real):
        return dense(keep=real[:, None, None, :])
    rule: Mask = lengths(keys=first + count)
    return rule & ~prefix(first) if bool(first.any()) else rule


def _written_out(x: Any) -> Any:
    if not isinstance(x, RuleTensor):
        return x
    B, _, Tq, Tk = x.shape
    keep = x.rule.to_bool(Tq, Tk, B=B, device=x.device)
    return keep.expand(B, 1, Tq, Tk).as_subclass(Booleans)
