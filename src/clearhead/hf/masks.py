"""The mask function that transformers calls. It returns a `LazyMask` if possible.

transformers describes a mask by a function of positions. The usual functions (causal, sliding
windows, chunks, packed documents, no mask, and any of these with padding) are recognised and become
a clearhead `Mask`. For any other function every cell is computed.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import masks
from ..core.errors import BadValue
from ..core.functional.ambient import CallPosition, ambient, eagerly_over_ranks, is_part_of_text
from ..core.masks.text_positions import padding_of
from ..core.torch_state import is_tracing
from .inspect_model import misreads_masks, not_answered
from .internals import CLOSURES
from .lazy_mask import BooleanMask, LazyMask


@eagerly_over_ranks
def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
    local_size: int | None = None, device: torch.device | str = "cpu", **others: Any,
) -> Tensor | None:  # fmt: skip
    """Return a boolean mask, (B, 1, Tq, Tk), where True means "may look".

    Query i has the position q_offset + i, key j the position kv_offset + j; `attention_mask`,
    (B, T), is 0 on padding. Returns None if the only query may look at all keys and the model
    accepts None, as in a decoding step. Raises `BadValue` for a model that computes its attention
    itself.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    config = type(others.get("config"))
    if misreads_masks(config.__module__):
        raise not_answered(config.__name__.removesuffix("Config"))
    function = causal_mask_function if mask_function is None else mask_function
    around = ambient()  # edits and statistics need the padding
    padded = None if attention_mask is None or not around.is_hooked else padding_of(attention_mask)
    recorded = torch.compiler.is_compiling() or is_tracing()
    if not recorded:
        # A graph would hold the padding of this call, and guard on the LazyMask and the positions.
        ranks = around.ranks
        first = None if ranks is None else ranks.tokens_before
        if ranks is not None:
            ranks.must_be_one_pass()
        if first is None:
            first, keys = int(q_offset), range(kv_offset, kv_offset + kv_length)
        else:  # the cache has only the keys of this rank
            keys = range(first + q_length)
        at = _Positions(range(first, first + q_length), keys, device)
        mask = _mask_of(function, at)
        padding: masks.Mask = masks.everything
        if attention_mask is not None:  # over ranks, its columns are not the keys
            columns = at.k if ranks is None else range(attention_mask.shape[1])
            padding = _padding(attention_mask, columns)
        if ranks is not None and (mask is None or padding is not masks.everything):
            wrong = "mask is of an unknown kind" if mask is None else "attention_mask has zeros"
            gave = f"The model's {wrong}, and the text is sharded over ranks."
            rule = "inside distributed.sharded, a mask of a model is causal, a window, or none."
            hint = "pass it to sharded(mask=...) instead, such as lengths(keys=...) for padding."
            raise BadValue(gave, rule, hint)
        if mask is not None:
            mask = masks.intersect(mask, padding)
            if mask is masks.everything and q_length == 1 and others.get("allow_is_causal_skip"):
                return None
            lazy = LazyMask.of(mask, batch_size, q_length, kv_length, torch.device(device))
            lazy.position = CallPosition(first or None, keys.start, padded)
            return lazy
    others.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    cells = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask,
        local_size, device=device, **others,
    )  # fmt: skip
    assert isinstance(cells, Tensor)
    if recorded:
        return cells
    written = cells.as_subclass(BooleanMask)
    written.position = CallPosition(int(q_offset) or None, kv_offset, padded)
    return written


class _Positions(NamedTuple):
    """The positions of queries and keys in the text."""

    q: range
    k: range
    device: torch.device | str

    @property
    def align(self) -> int:
        return self.q.start - self.k.start

    def tensor(self, of: range) -> Tensor:
        return torch.arange(of.start, of.stop, device=self.device)


def _mask_of(function: Callable[..., Any], at: _Positions) -> masks.Mask | None:
    """Return the mask of a mask function of transformers; None for an unknown function."""
    from transformers import masking_utils

    if function is masking_utils.bidirectional_mask_function:
        return masks.everything
    if function is masking_utils.causal_mask_function:
        # A single query in decoding may look at all keys. Edits need its position from the mask.
        sees_all = at.q.start >= at.k.stop - 1 and not (ambient().is_hooked or is_part_of_text())
        return masks.everything if sees_all else masks.Causal(align=at.align)
    if parts := _closure(function, "and_masks").get("mask_functions"):
        return _intersection(parts, at)
    if variables := _closure(function, "sliding_window_overlay"):
        size = variables["sliding_window"]
        return masks.window(before=size - 1, align=at.align) if size > 0 else None
    if variables := _closure(function, "sliding_window_bidirectional_overlay"):
        size = variables["sliding_window"]
        return masks.window(before=size, after=size, align=at.align) if size >= 0 else None
    if variables := _closure(function, "chunked_overlay"):
        if ambient().ranks is not None:
            return None
        first = variables["left_padding"].unsqueeze(-1)
        queries, keys = ((at.tensor(x) - first) // variables["chunk_size"] for x in (at.q, at.k))
        return masks.documents(keys, queries=queries)
    if variables := _closure(function, "packed_sequence_mask_function"):
        ids = variables["packed_sequence_mask"]
        if (ranks := ambient().ranks) is not None:  # positions jump between the ranges of a shard
            ranks.must_be_one_text(ids)
            return masks.everything
        return masks.documents(
            ids[:, at.k.start : at.k.stop], queries=ids[:, at.q.start : at.q.stop]
        )
    return None


def _intersection(functions: tuple[Callable[..., Any], ...], at: _Positions) -> masks.Mask | None:
    if any(_closure(function, "packed_sequence_mask_function") for function in functions):
        functions = tuple(map(_without_remap, functions))
    mask: masks.Mask = masks.everything
    for function in functions:
        part = _mask_of(function, at)
        if part is None:
            return None
        mask = masks.intersect(mask, part)
    return mask


def _without_remap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remove the remapping of positions to the start of each document.

    It does not change distances within a document, and only chunks depend on anything else.
    """
    inner = _closure(function, "remap_positions_for_packed_sequence").get("mask_function")
    return function if inner is None or _has_chunks(inner) else inner


def _has_chunks(function: Callable[..., Any]) -> bool:
    parts = _closure(function, "and_masks").get("mask_functions", ())
    return bool(_closure(function, "chunked_overlay")) or any(map(_has_chunks, parts))


def _closure(function: Any, maker: str) -> dict[str, Any]:
    """Return the closure variables of a function that transformers' `maker` returned.

    Empty for any other function.
    """
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>."):
        return {}
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return {name: cells[name].cell_contents for name in CLOSURES[maker]}


def _padding(real: Tensor, keys: range) -> masks.Mask:
    """Return the mask of real keys, from a tensor (B, T) that is 0 on padding.

    Padding only at the ends is stored as counts.
    """
    tokens = real[:, keys.start : keys.stop].cpu().numpy() != 0
    if tokens.shape[1] < len(keys):  # a static cache has memory for future keys
        tokens = np.pad(tokens, ((0, 0), (0, len(keys) - tokens.shape[1])))
    if tokens.all():
        return masks.everything
    first, after = tokens.argmax(1), len(keys) - tokens[:, ::-1].argmax(1)
    if (after - first != tokens.sum(1)).any():
        return masks.dense(keep=torch.from_numpy(tokens)[:, None, None, :].to(real.device))
    mask: masks.Mask = (
        masks.lengths(keys=after.tolist()) if after.min() < len(keys) else masks.everything
    )
    return masks.intersect(mask, _without_first(tuple(first.tolist()))) if first.any() else mask


@lru_cache(maxsize=64)
def _without_first(counts: tuple[int, ...]) -> masks.Mask:
    """Return the mask without the first tokens of each text. Cached for all steps of generation."""
    return ~masks.prefix(counts)
