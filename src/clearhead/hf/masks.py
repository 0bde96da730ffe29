"""The mask function that transformers calls: a rule where it can be recognised, else booleans.

transformers describes a mask by a function of positions and wants a tensor back. Written out, that
tensor is Tq x Tk booleans, 1 GB for 32k tokens. So the usual rules (causal, sliding windows,
chunks, packed documents, no rule at all, each with padding) come back as a `RuleTensor`, which
takes no memory. A model may still slice it or add to it: then, and only then, it is written out.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..api.hooks import active_ranks
from ..errors import BadValue
from ..masks import Causal, Mask, dense, documents, everything, intersect, lengths, prefix, window

# What may be asked of a tensor without looking at its cells.
_SHAPE_ONLY = {
    *(
        getattr(Tensor, n).__get__
        for n in ("shape", "dtype", "device", "ndim", "requires_grad", "_base")
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.stride,
    Tensor.storage_offset,
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
            raise _answers_itself()
        found = super().__torch_function__(func, types, args, kwargs)
        plain = isinstance(found, Booleans) and (found.dtype != torch.bool or func in _TURNED)
        return found.as_subclass(Tensor) if plain else found


class RuleTensor(Tensor):
    """Booleans (B, 1, Tq, Tk), True = may look, that stay a rule until somebody reads a cell. What
    is written into them is kept; what is cut out of them is a copy."""

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
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPE_ONLY:
                return func(*args, **kwargs)
        if func is Tensor.contiguous:  # asked of the masks of a static cache; a rule has no layout
            return args[0]
        if isinstance(kwargs.get("out"), RuleTensor):
            raise BadValue(
                f"torch.{func.__name__} was to write into a mask, by out=.",
                "what transformers gets from clearhead is a rule, which has no memory.",
                "clone the mask first: mask = mask.clone().",
            )
        plain, named = tree_map_only(RuleTensor, _written_out, (args, kwargs))
        if not (args and isinstance(args[0], RuleTensor) and _writes(func)):
            return func(*plain, **named)
        written = plain[0].clone()
        before = written._version
        result = func(written, *plain[1:], **named)
        if written._version == before:  # requires_grad_ and the like
            return result
        args[0].rule = dense(keep=written.as_subclass(Tensor))
        return args[0]

    def as_subclass(self, cls: Any) -> Any:
        return _written_out(self).as_subclass(cls)


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

    # Here, because it brings torch's compiler, which takes longer to import than all the rest.
    from .sources import hands_attention_over

    if not hands_attention_over(type(others.get("config")).__module__):
        raise _answers_itself()
    function = causal_mask_function if mask_function is None else mask_function
    others.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)

    def cells(first: Any) -> Tensor:
        found = sdpa_mask(
            batch_size, q_length, kv_length, first, kv_offset, function, attention_mask,
            local_size, device=device, **others,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found

    if torch.compiler.is_compiling():
        # A graph is made for tensors of any length: a rule would be a Python object that it has to
        # guard, and a position as a number would make it a graph for one place.
        return cells(q_offset)
    start = int(q_offset)
    places = _Places(
        range(start, start + q_length), range(kv_offset, kv_offset + kv_length), device
    )
    rule = _recognise(function, places)
    if active_ranks() is not None and (rule is None or not _all_real(attention_mask)):
        raise BadValue(
            "The model's mask is padded, or of a kind that is not known here, and the text is cut "
            "over ranks.",
            "inside of distributed.sharded a mask is a rule over all positions: causal, a sliding "
            "window, or none.",
            "pass no attention_mask; what else masks goes to sharded(mask=...), for example "
            "mask=lengths(keys=...) for padding.",
        )
    if rule is None:
        return cells(start).as_subclass(Booleans)
    if attention_mask is not None:
        real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        real = torch.nn.functional.pad(real, (0, kv_length - real.shape[1]))
        if not bool(real.all()):
            rule = intersect(rule, _padding(real))
    return RuleTensor.of(rule, batch_size, q_length, kv_length, torch.device(device))


def _answers_itself() -> BadValue:
    return BadValue(
        "The model puts its mask on scores of its own, and the mask is booleans.",
        "clearhead answers models that hand attention to transformers' interface; this one "
        "computes it itself, or needs a mask of numbers.",
        "load this model with attn_implementation='eager', or take one that goes through the "
        "interface, for example a BERT, GPT-2, Llama, Mistral, Qwen or Gemma.",
    )


def _all_real(attention_mask: Tensor | None) -> bool:
    return attention_mask is None or bool(attention_mask.all())


class _Places(NamedTuple):
    """The positions that queries and keys have in the text."""

    q: range
    k: range
    device: torch.device | str

    @property
    def align(self) -> int:
        return self.q.start - self.k.start

    def positions(self, of: range) -> Tensor:
        return torch.arange(of.start, of.stop, device=self.device)


def _recognise(function: Callable[..., Any], at: _Places) -> Mask | None:
    """The rule that a mask function follows, if it is made of the usual ones."""
    from transformers import masking_utils

    if function is masking_utils.bidirectional_mask_function:
        return everything
    if function is masking_utils.causal_mask_function:
        return Causal(align=at.align)
    if parts := _closed_over(function, "and_masks").get("mask_functions"):
        return _all_of(parts, at)
    if held := _closed_over(function, "sliding_window_overlay"):
        size = held["sliding_window"]
        return window(before=size - 1, align=at.align) if size > 0 else None
    if held := _closed_over(function, "sliding_window_bidirectional_overlay"):
        size = held["sliding_window"]
        return window(before=size, after=size, align=at.align) if size >= 0 else None
    if held := _closed_over(function, "chunked_overlay"):
        if active_ranks() is not None:
            return None
        first = held["left_padding"].unsqueeze(-1)
        queries, keys = ((at.positions(x) - first) // held["chunk_size"] for x in (at.q, at.k))
        return documents(keys, queries=queries)
    if held := _closed_over(function, "packed_sequence_mask_function"):
        ids = held["packed_sequence_mask"]
        if (ranks := active_ranks()) is not None:  # positions jump where a shard's ranges meet
            ranks.must_be_one_text(ids)
            return everything
        return documents(ids[:, at.k.start : at.k.stop], queries=ids[:, at.q.start : at.q.stop])
    return None


def _all_of(functions: tuple[Callable[..., Any], ...], at: _Places) -> Mask | None:
    packed, *rest = functions
    if _closed_over(packed, "packed_sequence_mask_function") and len(rest) == 1:
        # Positions begin anew in each document. Within one that changes no distance, and rules of
        # distances are all that is known here but chunks.
        inner = _closed_over(rest[0], "remap_positions_for_packed_sequence").get("mask_function")
        if inner is not None and not _has_chunks(inner):
            functions = packed, inner
    rule: Mask = everything
    for function in functions:
        part = _recognise(function, at)
        if part is None:
            return None
        rule = intersect(rule, part)
    return rule


def _has_chunks(function: Callable[..., Any]) -> bool:
    parts = _closed_over(function, "and_masks").get("mask_functions", ())
    return bool(_closed_over(function, "chunked_overlay")) or any(map(_has_chunks, parts))


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


def _writes(func: Callable[..., Any]) -> bool:
    """May this function of torch change its first argument?"""
    name = func.__name__
    return name in ("__setitem__", "__iand__", "__ior__", "__ixor__") or (
        name.endswith("_") and not name.endswith("__")
    )


def _written_out(x: RuleTensor) -> Tensor:
    B, _, Tq, Tk = x.shape
    keep = x.rule.to_bool(Tq, Tk, B=B, device=x.device)
    return keep.expand(B, 1, Tq, Tk).as_subclass(Booleans)
