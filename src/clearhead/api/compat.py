"""torch's signature on our door, so that it can stand in for torch's own function."""

import math

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of
from ..masks import Causal, Mask, dense, everything
from ..problem.biases import TensorBias, bias
from ..torch_state import is_autocast
from .attention import attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with the same meaning.

    `query` is (..., Hq, L, E), `key` (..., H, S, E), `value` (..., H, S, Ev), with any leading
    dimensions, which broadcast. A boolean `attn_mask` has True where a query may look; a floating
    one, of the dtype of `query` or float32, is added to the scaled scores; both broadcast to
    (..., Hq, L, S). `is_causal` is aligned at the start (the top-left corner) and excludes
    `attn_mask`. `dropout_p` always applies, outside training too; on a CPU it drops the
    cells that torch's own would of up to 65536 weights, and of more, several times as fast, those
    of a seed from the same generator (see `attention`). `scale=None` means 1/sqrt(E).
    `enable_gqa` lets the heads of key and of value divide Hq. Autocast holds as for torch's own.

    Two things are better defined here: a row that may see nothing gives 0, and NaN or infinity at
    a masked position (False, or -inf in a floating mask) does not leak, on any path or device.
    Raises `BadValue` and `BadType` where torch raises RuntimeError.
    """
    _check(query, key, value, attn_mask, is_causal)
    if is_autocast(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_cast(x, dtype) for x in (query, key, value))
        attn_mask = None if attn_mask is None else _cast(attn_mask, dtype)
    if attn_mask is not None:
        _check_mask_dtype(attn_mask, query.dtype)

    three = (query, key, value)
    rank = max(x.dim() for x in three)
    lead = _broadcast("leading dimensions", [x.shape[:-3] for x in three])
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in three]
    if not enable_gqa:
        heads = 3 * list(_broadcast("heads (enable_gqa is False)", [(h,) for h in heads]))
    q, k, v = (
        x.expand(*lead, h, *x.shape[-2:]).reshape(math.prod(lead), h, *x.shape[-2:])
        for x, h in zip(three, heads, strict=True)
    )
    if heads[1] != heads[2]:  # the door wants one number of key heads; torch, that each divides Hq
        k, v = (_repeat(x, heads[0]) for x in (k, v))

    mask: Mask = Causal(align="start") if is_causal else everything
    added = None
    if attn_mask is not None:
        mask, added = _rules(attn_mask, (*lead, heads[0], q.shape[2], k.shape[2])[-rank:])
    out = attention(q, k, v, mask=mask, bias=added, scale=scale, dropout=dropout_p)
    return out.reshape(*(*lead, *out.shape[1:])[-rank:])


def _rules(attn_mask: Tensor, shape: tuple[int, ...]) -> tuple[Mask, TensorBias | None]:
    """Who may look, and what is added."""
    four = _four_dimensions(attn_mask, shape)
    return (dense(keep=four), None) if four.dtype == torch.bool else (everything, bias(four))


def _four_dimensions(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask for scores of `shape`, its leading dimensions made one, if it has any."""
    missing = len(shape) - attn_mask.dim()
    sizes = (1,) * missing + tuple(attn_mask.shape)
    if missing < 0 or any(m != 1 and m != s for m, s in zip(sizes, shape, strict=True)):
        raise BadValue(
            f"attn_mask has shape {tuple(attn_mask.shape)}; the scores are {shape}.",
            "attn_mask broadcasts to the scores, (..., Hq, L, S).",
            "give each of its dimensions that size or 1.",
        )
    lead, last = shape[:-3], sizes[-3:]
    if all(size == 1 for size in sizes[:-3]):
        return attn_mask.reshape(last)
    return attn_mask.expand(*lead, *last).reshape(math.prod(lead), *last)


def _repeat(x: Tensor, Hq: int) -> Tensor:
    H = x.shape[1]
    if H == 0 or Hq % H:
        raise BadValue(
            f"There are {Hq} query heads and {H} key or value heads.",
            "with enable_gqa=True, the heads of key and of value each divide those of query.",
            "change the number of heads.",
        )
    return x.repeat_interleave(Hq // H, 1)


def _broadcast(what: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise BadValue(
            f"The {what} of query, key and value are {', '.join(str(tuple(s)) for s in shapes)}.",
            "they broadcast together; with enable_gqa=True, key heads divide query heads.",
            "give them one size, or 1.",
        ) from error


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an argument: float64 and integers stay as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _check(query: object, key: object, value: object, attn_mask: object, is_causal: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and not (name == "attn_mask" and x is None):
            raise BadType(
                f"{name} is {kind_of(x)}.",
                "query, key and value are tensors, and attn_mask is a tensor or None.",
                f"pass torch.as_tensor({name}).",
            )
        if isinstance(x, Tensor) and x.is_nested:
            raise BadType(
                f"{name} is nested.",
                "query, key, value and attn_mask are dense tensors here.",
                f"pass {name}.to_padded_tensor(0.0) with an attn_mask, or call "
                "clearhead.attention with mask=documents(...).",
            )
        if isinstance(x, Tensor) and x.layout is not torch.strided:
            raise BadType(
                f"{name} is of layout {x.layout}.",
                "query, key, value and attn_mask are dense tensors with strides.",
                f"pass {name}.to_dense().",
            )
        if isinstance(x, Tensor) and name != "attn_mask" and x.dim() < 2:
            raise BadValue(
                f"{name} has shape {tuple(x.shape)}.",
                "query, key and value have at least two dimensions, (..., T, E).",
                f"pass {name}.unsqueeze(0) if it is a single position.",
            )
    if attn_mask is not None and is_causal:
        raise BadValue(
            "attn_mask was given together with is_causal=True.",
            "torch's function takes one or the other.",
            "write the causal rule into attn_mask, or call clearhead.attention with "
            "mask=Causal(align='start') and bias=attn_mask (or & dense(keep=attn_mask)).",
        )


def _check_mask_dtype(attn_mask: Tensor, dtype: torch.dtype) -> None:
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise BadType(
            f"attn_mask has dtype {attn_mask.dtype} and query {dtype}.",
            "attn_mask is boolean (True = may look), or floating (added to the scores) with the "
            "dtype of query or float32.",
            "pass attn_mask.bool() if 1 means may look, attn_mask.to(query.dtype) if it is added.",
        )
