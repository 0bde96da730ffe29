"""The attention function that transformers calls."""

from typing import Any

import torch
from torch import Tensor

from ..api.attention import attention, matrix
from ..errors import BadValue
from ..masks import Mask, causal, dense, everything
from .masks import Booleans, RuleTensor

# What is passed along although it has been applied before (positions are in the queries and keys,
# sliding windows are in the mask), goes into the model (tokens, their types, images), or is about
# what comes out of it (logits, loss), as plain yes-or-no switches are.
_NOT_ABOUT_ATTENTION = {
    "position_ids", "cache_position", "sliding_window",
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
    does not change the output. Raises `BadValue` for an argument whose meaning is not known here,
    rather than ignoring it; only switches, True or False, are taken to speak of the model.
    """
    answer = _answer
    if torch.compiler.is_compiling() and isinstance(attention_mask, RuleTensor):
        # A layer that is compiled by itself, in a model that is not: a graph knows no rules.
        answer = torch.compiler.disable(_answer)
    return answer(module, query, key, value, attention_mask, **keywords)


def _answer(
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
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    unknown = {
        name
        for name, value in others.items()
        if not (value is None or isinstance(value, bool) or name in _NOT_ABOUT_ATTENTION)
    }
    if unknown:
        raise BadValue(
            f"The model passed {', '.join(sorted(unknown))} to its attention function.",
            "clearhead answers only what it understands in full.",
            "load this model with another attn_implementation.",
        )
    bias = position_bias
    mask: Mask = everything
    if isinstance(attention_mask, RuleTensor):
        mask = attention_mask.rule
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        written = isinstance(attention_mask, Booleans)
        mask = dense(keep=attention_mask.as_subclass(Tensor) if written else attention_mask)
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    elif query.shape[2] > 1 and (
        getattr(module, "is_causal", False) if is_causal is None else is_causal
    ):
        mask = causal
    keywords: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux if s_aux is None else s_aux.to(query.dtype),
        "dropout": dropout if module.training else 0.0,
    }
    out = attention(query, key, value, **keywords)
    weights = None
    if output_attentions or _collected():
        weights = matrix(query, key, **keywords).to_dense().to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _collected() -> bool:
    """Does transformers collect the weights of this call? Some models (GPT-2, OPT) are asked to
    return them and do not pass that on to their attention function."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())
