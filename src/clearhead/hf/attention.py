"""The attention function that transformers calls."""

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import BadValue
from ..functional.ambient import ambient, at_position
from ..functional.attention import attention
from ..functional.matrix import matrix
from ..masks import Mask, causal, dense, documents, everything, intersect
from ..torch_state import has_values
from .lazy_mask import BooleanMask, LazyMask

# Keywords that change nothing here: what has been applied before (positions are in queries and
# keys, a sliding window and a sequence index in the mask), what goes into the model, and what is
# made of its output. `max_length_*` follow from `cu_seq_lens_*`.
_NO_EFFECT = {
    "position_ids", "cache_position", "sliding_window", "max_length_q", "max_length_k",
    "token_type_ids", "mm_token_type_ids", "decoder_input_ids", "pixel_values",
    "output_hidden_states", "logits_to_keep",
    "labels", "shift_labels", "num_items_in_batch", "ignore_index", "reduction",
}  # fmt: skip


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a model calls: query (B, H, Tq, D), key and value with their own G heads, not repeated.

    Returns the output as (B, Tq, H, Dv), contiguous, and the weights (B, H, Tq, Tk) if the call
    asked for `output_attentions`, else None. The weights never carry dropout, and asking for them
    does not change the output. Where `cu_seq_lens_q` and `cu_seq_lens_k` say that texts are packed,
    each sees only itself. Raises `BadValue` for an argument whose meaning is not known here,
    rather than ignoring it; only switches, True or False, are taken to be about the model.
    """
    answer = _attend
    if torch.compiler.is_compiling() and isinstance(attention_mask, LazyMask):
        # A layer that is compiled by itself, in a model that is not: a graph has no lazy masks.
        answer = torch.compiler.disable(_attend)
    return answer(module, query, key, value, attention_mask, **keywords)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    for name, given in others.items():
        if not (given is None or isinstance(given, bool) or name in _NO_EFFECT):
            raise BadValue(
                f"The model passed {name} to its attention function.",
                "clearhead answers only what it understands in full.",
                "load this model with another attn_implementation.",
            )
    bias = position_bias
    mask: Mask = everything
    if isinstance(attention_mask, LazyMask):
        mask = attention_mask.mask
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        written = isinstance(attention_mask, BooleanMask)
        mask = dense(keep=attention_mask.as_subclass(Tensor) if written else attention_mask)
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    elif query.shape[2] > 1 and (
        getattr(module, "is_causal", False) if is_causal is None else is_causal
    ):
        mask = causal
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        lengths = query.shape[2], key.shape[2]
        mask = _each_text_alone(mask, attention_mask, cu_seq_lens_q, cu_seq_lens_k, *lengths)
    keywords: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux if s_aux is None else s_aux.to(query.dtype),
        "dropout": dropout if module.training else 0.0,
    }
    position: AbstractContextManager[None] = nullcontext()
    if ambient().is_hooked and isinstance(attention_mask, BooleanMask | LazyMask):
        position = at_position(attention_mask.position)
    weights = None
    with position:
        out = attention(query, key, value, **keywords)
        if output_attentions or _collects_weights():
            weights = _weights(query, key, keywords)
    return out.transpose(1, 2).contiguous(), weights


# All keywords that are answered. Of others, only None and switches are accepted.
KEYWORDS = {*inspect.signature(_attend).parameters, *_NO_EFFECT} - {"others"}


def _each_text_alone(
    mask: Mask, given: Tensor | None, starts_q: Tensor, starts_k: Tensor, Tq: int, Tk: int
) -> Mask:
    """`mask`, and a query sees only keys of its own text. The starts say where in the row each text
    begins, and end with the length of the row. The layers of a model pass the same tensors, so what
    was made of them is kept with the mask that was `given`."""
    kept = getattr(given, "each_alone", None)
    if kept is not None and kept[0] is mask and kept[1] is starts_q:
        return kept[2]
    if has_values(starts_q, starts_k) and not (
        torch.equal(starts_q, starts_k) and Tq == Tk == int(starts_q[-1])
    ):
        raise BadValue(
            f"cu_seq_lens_q ends with {int(starts_q[-1])} and cu_seq_lens_k with "
            f"{int(starts_k[-1])}, for {Tq} queries and {Tk} keys.",
            "texts are packed into one row, and their queries and keys begin at the same places.",
            "pass what DataCollatorWithFlattening(return_flash_attn_kwargs=True) returns, with no "
            "keys in a cache before it.",
        )
    place = torch.arange(Tq, device=starts_q.device)
    alone = intersect(mask, documents(torch.searchsorted(starts_q, place, right=True)))
    if isinstance(given, LazyMask):
        given.each_alone = mask, starts_q, alone
    return alone


def _weights(query: Tensor, key: Tensor, keywords: dict[str, Any]) -> Tensor:
    weights = matrix(query, key, **keywords)
    cells = math.prod(weights.shape)
    try:
        return weights.to_dense(most=cells).to(query.dtype)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise BadValue(
            f"output_attentions=True asks for {' x '.join(map(str, weights.shape))} weights a "
            f"layer, {4 * cells / 1e9:.1f} GB in fp32.",
            "the weights of a layer are given where memory has room for a few times as much.",
            "pass fewer or shorter texts, or leave output_attentions out and ask for what you need "
            "of the weights: with clearhead.watch(model, stats=[...], exact_rows=[...]).",
        ) from error


def _collects_weights() -> bool:
    """Does transformers collect the weights of this call? Some models (GPT-2, OPT) are asked to
    return them and do not pass that on to their attention function."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())
