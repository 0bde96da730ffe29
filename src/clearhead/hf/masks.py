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

from ..masks import Causal, Mask, dense, everything, lengths, prefix, window

# What may be asked of a tensor without looking at its cells.
_SHAPE_ONLY = {
    *(getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "requires_grad")),
    Tensor.size,
    Tensor.dim,
}


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
    rule = _recognise(function, start, q_length, kv_offset, kv_length, local_size)
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
        return written
    return RuleTensor.of(rule, batch_size, q_length, kv_length, torch.device(device))


def _recognise(
    function: Callable[..., Any], start: int, Tq: int, k_start: int, Tk: int, size: int | None
) -> Mask | None:
    """The rule that a mask function follows, if it is one of the usual ones.

    A sliding window hides in a closure, so the guess is put to the function itself, at the edges
    where rules differ: a chunk, say, answers otherwise there and stays unrecognised.
    """
    from transformers import masking_utils

    align = start - k_start
    if function is masking_utils.bidirectional_mask_function:
        return everything
    if function is masking_utils.causal_mask_function:
        return Causal(align=align)
    if size is None or size < 1:
        return None
    for q in {start, start + Tq // 3, start + Tq // 2, start + Tq - 1, size, 2 * size + 1}:
        for k in {q - size - 1, q - size, q - size + 1, q - size // 2, q - 1, q, q + 1, 0}:
            if k < 0:
                continue
            place = [torch.tensor([i]) for i in (0, 0, q, k)]
            try:
                says = bool(function(*place))
            except (IndexError, TypeError, ValueError, RuntimeError):
                return None
            if says != (q - size < k <= q):
                return None
    return Causal(align=align) & window(before=size - 1, align=align)


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
    return keep.expand(B, 1, Tq, Tk)
