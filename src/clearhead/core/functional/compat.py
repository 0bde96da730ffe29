"""Replace torch's `scaled_dot_product_attention` by a function with the same signature."""

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

from ..errors import BadType, BadValue, kind_of, must_be_strided
from ..masks import Causal, Mask, dense, everything, intersect
from ..problem.biases import bias
from ..problem.check import checked_dropout
from ..torch_state import is_autocast, records_grad, without_repeats
from .ambient import ambient
from .attention import attention

__all__ = ["patched", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `torch.nn.functional.scaled_dot_product_attention` on clearhead.

    `query` is (..., Hq, L, E), `key` (..., H, S, E) and `value` (..., H, S, Ev); leading dimensions
    broadcast. `attn_mask` broadcasts to (..., Hq, L, S): a boolean mask has True where a query may
    look, and a floating mask, of the dtype of `query` or float32, is added to the scaled scores.
    `is_causal` counts both positions from 0, so query i sees keys 0 to i; `attn_mask` and
    `is_causal` can both apply. `scale=None` means 1/sqrt(E). With `enable_gqa` the heads of key and
    of value divide Hq. Autocast applies as it does to torch's function.

    `dropout_p` applies outside training too. On a CPU it drops the same weights as torch if there
    are at most 65536. For more weights torch's generator draws a seed (see `attention`).

    Some results of torch depend on its kernel; here they are defined. A fully masked query gets 0,
    and NaN or infinity at a masked position (False or -inf) does not affect the output. Raises
    `BadValue` and `BadType` where torch raises RuntimeError.
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
    if heads[1] != heads[2]:  # torch allows this, and `attention` does not
        k, v = (_repeat(x, heads[0]) for x in (k, v))

    mask: Mask = Causal(align="start") if is_causal else everything
    added = None
    if attn_mask is not None:
        four = _four_dimensions(attn_mask, (*lead, heads[0], q.shape[2], k.shape[2])[-rank:])
        four = four if dtype is None else _cast(four, dtype)
        if four.dtype not in (torch.bool, torch.float32, query.dtype):
            gave = f"attn_mask has dtype {four.dtype} and query {query.dtype}."
            rule = "a mask is boolean (True: may look), or is added, in query's dtype or float32."
            hint = "pass attn_mask.bool() if 1 may look, or attn_mask.to(query.dtype) to add it."
            raise BadType(gave, rule, hint)
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
    """Replace torch's `scaled_dot_product_attention` by clearhead's inside the `with` block.

    Models that call it then run on clearhead and can be watched: `torch.nn.TransformerEncoder`,
    timm, diffusers, and transformers with ``attn_implementation="sdpa"``.

    >>> import torch, clearhead as ch
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with ch.compat.patched(), ch.watch(model, stats=["entropy"]) as seen:
    ...     out = model(torch.randn(1, 5, 8))
    >>> seen[0].entropy.shape
    torch.Size([1, 2, 5])

    The block applies to the thread (or task) that entered it, and to no other thread, even if it is
    started inside. Blocks nest, and the end of the last one restores torch's function, after errors
    too. ``@ch.compat.patched()`` wraps each call of a function in a block. Graphs that
    `torch.compile` compiles while a block is open in any thread contain clearhead; outside they are
    compiled again.

    The block also switches off torch's fused paths for `nn.TransformerEncoder` and
    `nn.MultiheadAttention` in evaluation mode, which bypass the function. Two cases stay on torch:
    `nn.MultiheadAttention` with ``need_weights=True``, its default, and modules that imported the
    function by name before (``from torch.nn.functional import ...``). `watch`, `intervene`,
    `effects` and `report` warn of those that they recognise.
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
    """Count the open blocks. The first one replaces torch's functions, the last restores them."""
    global _open_blocks
    with _lock:
        if not _open_blocks:
            for module, name, ours in (
                (torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention),
                (torch.backends.mha, "get_fastpath_enabled", _no_fast_path),
            ):
                original = getattr(module, name)
                choosing = _ours_inside(ours, original)
                _originals.append((module, name, choosing, original))
                setattr(module, name, choosing)
        _open_blocks += change
        if not _open_blocks:
            for module, name, choosing, original in _originals:
                if getattr(module, name) is choosing:  # else other code has replaced it
                    setattr(module, name, original)
            _originals.clear()


def _no_fast_path() -> bool:
    """Switch off torch's fast paths, and guard on the ranks of the call: torch.compile does not
    trace `nn.MultiheadAttention` down to its attention."""
    ambient()
    return False


def _ours_inside(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `ours` inside a block, and the original elsewhere."""

    @functools.wraps(original)
    def choosing(*args: Any, **keywords: Any) -> Any:
        # torch.compile cannot read a ContextVar, so a graph calls ours while any block is open.
        inside = _open_blocks if torch.compiler.is_compiling() else _inside.get()
        return (ours if inside else original)(*args, **keywords)

    return choosing


def _four_dimensions(attn_mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the mask for scores of `shape`, with its leading dimensions flattened into one."""
    missing = len(shape) - attn_mask.dim()
    sizes = (1,) * missing + tuple(attn_mask.shape)
    if missing < 0 or any(m != 1 and m != s for m, s in zip(sizes, shape, strict=True)):
        gave = f"attn_mask has shape {tuple(attn_mask.shape)}; the scores are {shape}."
        rule = "attn_mask broadcasts to the scores, (..., Hq, L, S)."
        raise BadValue(gave, rule, "make each of its dimensions that size or 1.")
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
        rule = "with enable_gqa=True, the heads of key and of value each divide those of query."
        hint = "change the number of heads."
        raise BadValue(f"There are {Hq} query heads and {H} key or value heads.", rule, hint)
    return x.repeat_interleave(Hq // H, 1)


def _broadcast(what: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        gave = f"The {what} of query, key and value are {', '.join(str(tuple(s)) for s in shapes)}."
        rule = "they broadcast together; with enable_gqa=True, key heads divide query heads."
        raise BadValue(gave, rule, "give them one size, or 1.") from error


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert an argument as autocast does: float64 and integers stay as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _check(query: object, key: object, value: object, attn_mask: object) -> None:
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and not (name == "attn_mask" and x is None):
            rule = "query, key and value are tensors, and attn_mask is a tensor or None."
            raise BadType(f"{name} is {kind_of(x)}.", rule, f"pass torch.as_tensor({name}).")
        if isinstance(x, Tensor):
            rule = "query, key, value and attn_mask are dense tensors with strides."
            hint = f"pass {name}.to_padded_tensor(0) and attn_mask, or use clearhead.documents."
            must_be_strided(name, x, rule, hint)
        if isinstance(x, Tensor) and name != "attn_mask" and x.dim() < 2:
            rule = "query, key and value have at least two dimensions, (..., T, E)."
            hint = f"pass {name}.unsqueeze(0) if it is a single position."
            raise BadValue(f"{name} has shape {tuple(x.shape)}.", rule, hint)
