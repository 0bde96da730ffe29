"""torch's signature on our door, so that it can stand in for torch's own function."""

import torch
from torch import Tensor

from .attend import attention
from .biases import bias
from .errors import BadType, BadValue
from .masks import Causal, Mask, dense, everything


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with the same meaning.

    `query` is (..., Hq, L, E), `key` (..., H, S, E), `value` (..., H, S, Ev), with any leading
    dimensions, which broadcast. A boolean `attn_mask` has True where a query may look; a floating
    one is added to the scaled scores; both broadcast to (..., Hq, L, S). `is_causal` is aligned at
    the start (the top-left corner) and excludes `attn_mask`. `dropout_p` always applies, outside
    training too. `scale=None` means 1/sqrt(E). `enable_gqa` lets H divide Hq.

    Two things are better defined here: a row that may see nothing gives 0, and NaN or infinity at
    a masked position does not leak. Raises `BadValue` and `BadType` where torch raises
    RuntimeError.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() < 2:
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise BadType(
                f"{name} is {given}.",
                "query, key and value are tensors with at least two dimensions, (..., T, E).",
                f"pass a tensor as {name}=.",
            )
    if attn_mask is not None and is_causal:
        raise BadValue(
            "attn_mask was given together with is_causal=True.",
            "torch's function takes one or the other.",
            "write the causal rule into attn_mask, or use clearhead.attention with "
            "mask=Causal(align='start') & dense(keep=attn_mask).",
        )
    lead = _broadcast("leading dimensions", *(x.shape[:-3] for x in (query, key, value)))
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if not enable_gqa:
        H = _broadcast("heads (enable_gqa is False)", *((h,) for h in heads))[0]
        heads = [H, H, H]
    q, k, v = (
        x.expand(*lead, h, *x.shape[-2:]).reshape(-1, h, *x.shape[-2:])
        for x, h in zip((query, key, value), heads, strict=True)
    )
    if k.shape[1] != v.shape[1]:  # torch lets key and value heads differ; each divides Hq
        k, v = (x.repeat_interleave(max(heads[1:]) // x.shape[1], 1) for x in (k, v))
    mask: Mask = Causal(align="start") if is_causal else everything
    added = None
    if attn_mask is not None:
        shape = (*lead, q.shape[1], q.shape[2], k.shape[2])
        four = _mask_of(attn_mask, shape)
        if attn_mask.dtype == torch.bool:
            mask = dense(keep=four)
        else:
            added = bias(four)
    out = attention(q, k, v, mask=mask, bias=added, scale=scale, dropout=float(dropout_p))
    rank = max(x.dim() for x in (query, key, value))
    return out.reshape(*((*lead, out.shape[1]) if rank > 2 else ()), *out.shape[2:])


def _broadcast(what: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise BadValue(
            f"The {what} of query, key and value are {', '.join(str(tuple(s)) for s in shapes)}.",
            "they broadcast together; with enable_gqa=True, key heads divide query heads.",
            "give them one size, or 1.",
        ) from error


def _mask_of(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask with four dimensions, leading ones flattened only if it has them."""
    try:
        torch.broadcast_shapes(attn_mask.shape, shape)
        full = attn_mask.dim() <= len(shape)
    except RuntimeError:
        full = False
    if not full:
        raise BadValue(
            f"attn_mask has shape {tuple(attn_mask.shape)}; the scores are {shape}.",
            "attn_mask broadcasts to (..., Hq, L, S).",
            "give each of its dimensions that size or 1.",
        )
    if attn_mask.dim() <= 3 or all(s == 1 for s in attn_mask.shape[:-3]):
        return attn_mask.reshape(attn_mask.shape[-3:]) if attn_mask.dim() > 3 else attn_mask
    whole = attn_mask.expand(*shape[:-3], *attn_mask.shape[-3:])
    return whole.reshape(-1, *attn_mask.shape[-3:])
