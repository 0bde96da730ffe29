"""`scaled_dot_product_attention` with the signature of torch's own, and `patched`, which puts it in
the place of torch's own."""

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of
from ..masks import Causal, Mask, dense, everything, intersect
from ..problem.biases import bias
from ..problem.check import checked_dropout
from ..torch_state import is_autocast, records_grad, without_repeats
from .attention import attention

__all__ = ["patched", "scaled_dot_product_attention"]


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
    (..., Hq, L, S). `is_causal` is aligned at the start (the top-left corner); together with
    `attn_mask` both apply, as in torch's fused kernel for a CPU. `dropout_p` always applies,
    outside training too. On a CPU it drops the same weights as torch if there are at most 65536 of
    them; of more it drops those of a seed that torch's generator draws, several times as fast (see
    `attention`). `scale=None` means 1/sqrt(E). `enable_gqa` lets the heads of key and of value
    divide Hq. Autocast applies as it does to torch's function.

    Where torch's result depends on its kernel, this one is defined: a row that may see nothing
    gives 0, and NaN or infinity at a masked position (False, or -inf in a floating mask) does not
    leak. Raises `BadValue` and `BadType` where torch raises RuntimeError.
    """
    _check(query, key, value, attn_mask)
    dtype = None
    if is_autocast(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (_cast(x, dtype) for x in (query, key, value))

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
    if heads[1] != heads[2]:  # `attention` takes as many value heads as key heads; torch need not
        k, v = (_repeat(x, heads[0]) for x in (k, v))

    mask: Mask = Causal(align="start") if is_causal else everything
    added = None
    if attn_mask is not None:
        four = _four_dimensions(attn_mask, (*lead, heads[0], q.shape[2], k.shape[2])[-rank:])
        four = four if dtype is None else _cast(four, dtype)
        _check_mask_dtype(four, query.dtype)
        if four.dtype == torch.bool:
            mask = intersect(mask, dense(keep=four))
        else:
            added = bias(four)
    out = attention(q, k, v, mask=mask, bias=added, scale=scale, dropout=checked_dropout(dropout_p))
    return out.reshape(*(*lead, *out.shape[1:])[-rank:])


_inside: ContextVar[bool] = ContextVar("inside patched", default=False)
_lock = threading.Lock()
_open_blocks = 0  # in all threads
_originals: list[tuple[ModuleType, str, Callable[..., Any], Callable[..., Any]]] = []


@contextmanager
def patched() -> Iterator[None]:
    """Inside the `with` block, `torch.nn.functional.scaled_dot_product_attention` is clearhead's.

    So whatever calls it runs on clearhead and can be watched: `torch.nn.TransformerEncoder`, timm,
    diffusers, transformers models with ``attn_implementation="sdpa"``.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with ch.compat.patched(), ch.watch(model, stats=["entropy"]) as seen:
    ...     out = model(torch.randn(1, 5, 8))
    >>> seen[0].entropy.shape
    torch.Size([1, 2, 5])

    It holds in the thread (or task) that entered the block, not in others and not in threads that
    are started inside; blocks nest; torch's function is back when the last one ends, after an error
    too. ``@ch.compat.patched()`` before a function is the same block around each of its calls. What
    `torch.compile` compiles while a block is open anywhere takes clearhead into its graph, and is
    compiled again outside.

    torch's fused paths for `nn.TransformerEncoder` and `nn.MultiheadAttention` in evaluation mode,
    which call no such function, are off inside the block. `nn.MultiheadAttention` with
    ``need_weights=True``, its default, computes its weights without it, and modules that imported
    the function by name before (``from torch.nn.functional import ...``) keep torch's.
    """
    outer = _inside.get()
    _count_blocks(1)
    _inside.set(True)
    try:
        yield
    finally:
        _inside.set(outer)
        _count_blocks(-1)


def _count_blocks(change: int) -> None:
    """Count the open blocks: the first one replaces torch's functions, the last restores them."""
    global _open_blocks
    with _lock:
        if not _open_blocks:
            for module, name, ours in (
                (torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
                (torch.backends.mha, "get_fastpath_enabled", lambda: False),
            ):
                original = getattr(module, name)
                choosing = _ours_inside(ours, original)
                _originals.append((module, name, choosing, original))
                setattr(module, name, choosing)
        _open_blocks += change
        if not _open_blocks:
            for module, name, choosing, original in _originals:
                if getattr(module, name) is choosing:  # else somebody replaced it meanwhile
                    setattr(module, name, original)
            _originals.clear()


def _ours_inside(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `ours` inside a block and the original in every other thread."""

    @functools.wraps(original)
    def choosing(*args: Any, **keywords: Any) -> Any:
        # torch.compile cannot read a ContextVar, so a graph takes ours while any block is open.
        inside = _open_blocks if torch.compiler.is_compiling() else _inside.get()
        return (ours if inside else original)(*args, **keywords)

    return choosing


def _four_dimensions(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mask for scores of `shape`, its leading dimensions flattened into one, if it has any."""
    missing = len(shape) - attn_mask.dim()
    sizes = (1,) * missing + tuple(attn_mask.shape)
    if missing < 0 or any(m != 1 and m != s for m, s in zip(sizes, shape, strict=True)):
        raise BadValue(
            f"attn_mask has shape {tuple(attn_mask.shape)}; the scores are {shape}.",
            "attn_mask broadcasts to the scores, (..., Hq, L, S).",
            "give each of its dimensions that size or 1.",
        )
    if not records_grad(attn_mask):
        attn_mask = without_repeats(attn_mask)
        sizes = (1,) * missing + tuple(attn_mask.shape)
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
    """Convert an argument as autocast does: float64 and integers stay as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _check(query: object, key: object, value: object, attn_mask: object) -> None:
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


def _check_mask_dtype(attn_mask: Tensor, dtype: torch.dtype) -> None:
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        raise BadType(
            f"attn_mask has dtype {attn_mask.dtype} and query {dtype}.",
            "attn_mask is boolean (True = may look), or floating (added to the scores) with the "
            "dtype of query or float32.",
            "pass attn_mask.bool() if 1 means may look, attn_mask.to(query.dtype) if it is added.",
        )
