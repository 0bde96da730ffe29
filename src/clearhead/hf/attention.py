"""The attention function that transformers calls."""

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.functional.ambient import ambient, at_position, is_part_of_text
from ..core.functional.attention import attention
from ..core.functional.eager import eagerly
from ..core.functional.matrix import matrix
from ..core.masks import Mask, causal, dense, documents, everything, intersect
from ..core.torch_state import has_values
from .architectures import WITHOUT_EFFECT
from .lazy_mask import BooleanMask, LazyMask


class UnknownKeyword(BadValue):
    """A module passed a keyword that clearhead refuses."""

    def __init__(self, module: str, keyword: str) -> None:
        passes = f"{module} passes {keyword} to its attention function"
        self.reason = f"{passes}, which clearhead does not support."
        gave = f"{module} passed {keyword} to its attention function."
        rule = "clearhead refuses unknown arguments, because they may change the result."
        super().__init__(gave, rule, "load this model with another attn_implementation.")


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, **keywords: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention for a model of transformers.

    `query` is (B, H, Tq, D); `key` and `value` have G heads, not repeated. Returns the output as
    (B, Tq, H, Dv), contiguous, and the weights (B, H, Tq, Tk) with ``output_attentions=True``, else
    None. The weights never include dropout, and they do not change the output. With packed texts
    (`cu_seq_lens_q` and `cu_seq_lens_k`), a query looks only at its own text.

    Raises `BadValue` for an unknown argument, except for switches, True or False, which are assumed
    to concern the model.
    """
    # If the layer is compiled but the model is not: a graph cannot hold a LazyMask.
    attend = _attend_eagerly if isinstance(attention_mask, LazyMask) else _attend
    return attend(module, query, key, value, attention_mask, dropout=dropout, **keywords)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    for name, argument in others.items():
        if not (argument is None or isinstance(argument, bool) or name in WITHOUT_EFFECT):
            raise UnknownKeyword(type(module).__name__, name)
    bias = position_bias
    mask: Mask = everything
    if isinstance(attention_mask, LazyMask):
        mask = attention_mask.mask
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        written = isinstance(attention_mask, BooleanMask)
        mask = dense(keep=attention_mask.as_subclass(Tensor) if written else attention_mask)
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    elif (query.shape[2] > 1 or is_part_of_text()) and (
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


_attend_eagerly = eagerly(_attend)
# All supported keywords. Others are accepted only if they are None or switches.
KEYWORDS = {*inspect.signature(_attend).parameters, *WITHOUT_EFFECT} - {"others"}


def _each_text_alone(
    mask: Mask, passed: Tensor | None, starts_q: Tensor, starts_k: Tensor, Tq: int, Tk: int
) -> Mask:
    """Return `mask`, restricted to the keys of the query's own text.

    The starts are the columns at which texts begin, followed by the length of the row. The layers
    of a model pass the same tensors, so the result is cached with the `passed` mask.
    """
    cached = getattr(passed, "each_alone", None)
    if cached is not None and cached[0] is mask and cached[1] is starts_q:
        return cached[2]
    if has_values(starts_q, starts_k) and not (
        torch.equal(starts_q, starts_k) and Tq == Tk == int(starts_q[-1])
    ):
        ends = f"{int(starts_q[-1])} and {int(starts_k[-1])}"
        gave = f"cu_seq_lens_q and _k end with {ends}, for {Tq} queries and {Tk} keys."
        rule = "the two are equal, and end with the number of queries, which is that of keys."
        hint = "pass what DataCollatorWithFlattening(return_flash_attn_kwargs=True) returns."
        raise BadValue(gave, rule, hint)
    columns = torch.arange(Tq, device=starts_q.device)
    alone = intersect(mask, documents(torch.searchsorted(starts_q, columns, right=True)))
    if isinstance(passed, LazyMask):
        passed.each_alone = mask, starts_q, alone
    return alone


def _weights(query: Tensor, key: Tensor, keywords: dict[str, Any]) -> Tensor:
    weights = matrix(query, key, **keywords)
    cells = math.prod(weights.shape)
    try:
        return weights.to_dense(most=cells).to(query.dtype)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        shape = " x ".join(map(str, weights.shape))
        gave = f"output_attentions=True needs {shape} weights, {4 * cells / 1e9:.1f} GB in fp32."
        rule = "the weights of a layer need a few times this memory."
        hint = "pass less text, or use clearhead.watch(model, stats=[...], exact_rows=[...])."
        raise BadValue(gave, rule, hint) from error


def _collects_weights() -> bool:
    """Return whether transformers collects the weights of this call.

    Some models (GPT-2, OPT) do not pass `output_attentions` to their attention function.
    """
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return any("attentions" in name for name in _active_collector.get() or ())
