"""Define the KV cache, which stores keys and values so that new tokens do not recompute them.

Letters: B batch, G key/value heads, T tokens, D head dimension, Dv value size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..core.errors import BadValue, as_count
from ..core.errors.limits import TOKENS_AHEAD
from ..core.functional.ambient import cached_part
from ..core.problem.blocks import BlockTensor, in_blocks, must_be_format
from ..core.torch_state import in_backward, inference_ended, is_plain
from .checks import check_size, check_type


class KVCache:
    """Stores the keys (B, G, T, D) and values (B, G, T, Dv) of one attention layer.

    `length` is the number of stored tokens, `cut(n)` removes all but the first n, and `reset()`
    removes all. Each layer needs its own cache.

    With `dtype` "q8_0" or "q4_0" it stores numbers in blocks of ggml, in 8.5 or 4.5 bits each,
    rounded once when they are appended. Attention is then exact for the stored numbers: the core
    reads them in registers for up to 8 rows of a KV head, and other calls convert them first.
    `compare_caches` measures what the rounding costs a model. None stores them as they are.

    With `max_length`, the first `append` allocates memory for that many tokens. Without it, a full
    cache allocates memory for 256 more tokens. Under autograd, and while torch compiles or
    transforms, a cache without `max_length` copies at each `append` instead.

    In `distributed.sharded` a cache stores only the tokens of its rank, and `length` counts these.

    In a beam search, select and order sequences with a new cache: ``beams = KVCache()``, then
    ``beams.append(cache.keys[order], cache.values[order])``.

    Raises `BadValue` for keys and values that do not match each other or the stored ones; for more
    than `max_length` tokens; for keys that require a gradient, with `max_length` or `dtype`; in a
    backward pass, in which activation checkpointing recomputes a layer; for an unknown `dtype`; and
    with one for heads whose size is not a multiple of 32.
    """

    def __init__(self, max_length: int | None = None, dtype: str | None = None) -> None:
        if max_length is not None:
            max_length = check_size("KVCache", "max_length", max_length)
        must_be_format(dtype)
        self.max_length = max_length
        self.dtype = dtype
        self._read_as = torch.float32  # the dtype of the keys and values
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._owner: int | None = None

    @property
    def keys(self) -> Tensor | None:
        """The stored keys, (B, G, length, D); None before the first `append`."""
        return None if self._k is None else self._numbers(self._k)

    @property
    def values(self) -> Tensor | None:
        """The stored values, (B, G, length, Dv); None before the first `append`."""
        return None if self._v is None else self._numbers(self._v)

    def _filled(self, memory: Tensor | None) -> Tensor | None:
        """Return the part of the memory that has tokens."""
        return None if memory is None else memory[..., : self.length, :]

    def _numbers(self, memory: Tensor) -> Tensor:
        """Return the stored keys or values."""
        stored = memory[..., : self.length, :]
        return stored if self.dtype is None else BlockTensor(stored, self.dtype, self._read_as)

    def belongs_to(self, layer: nn.Module) -> None:
        """Remember the layer that fills this cache. Raises `BadValue` if another layer has."""
        if torch.compiler.is_compiling():  # the graph would have a guard on the layer's identity
            return
        if self.length and self._owner not in (None, id(layer)):
            gave = f"{type(layer).__name__} got a {self!r} that another layer has filled."
            rule = "each layer computes its own keys and values, so it needs its own cache."
            hint = "make one per layer; if you copy a layer, also copy.deepcopy its cache."
            raise BadValue(gave, rule, hint)
        self._owner = id(layer)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_owner": None}  # a copy of the layer may use a copy of the cache

    def __copy__(self) -> "KVCache":
        other = KVCache(self.max_length, self.dtype)
        other.__dict__.update(self.__getstate__())
        if other.max_length is not None and self._k is not None and self._v is not None:
            other._k, other._v = self._k.clone(), self._v.clone()  # it writes to this memory
        else:
            # full, so its next `append` copies them
            other._k, other._v = self._filled(self._k), self._filled(self._v)
        return other

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, and return all stored keys and values."""
        self._check(k, v)
        k, v = cached_part(k), cached_part(v)
        if self.dtype is not None:
            self._read_as = k.dtype
            k, v = (in_blocks(x, self.dtype).stored for x in (k, v))
        length = self.length + k.shape[-2]
        if self.max_length is None and (torch.is_grad_enabled() or not is_plain(k, v, self._k)):
            keys, values = self._filled(self._k), self._filled(self._v)
            self._k = k.clone() if keys is None else torch.cat([keys, k], -2)
            self._v = v.clone() if values is None else torch.cat([values, v], -2)
        else:
            if not self._has_memory_for(length):
                keys, values = self._filled(self._k), self._filled(self._v)
                most = length + TOKENS_AHEAD if self.max_length is None else self.max_length
                self._k, self._v = _enlarged(keys, k, most), _enlarged(values, v, most)
            assert self._k is not None and self._v is not None
            self._k[..., self.length : length, :] = k
            self._v[..., self.length : length, :] = v
        self.length = length
        return self._numbers(self._k), self._numbers(self._v)

    def _has_memory_for(self, length: int) -> bool:
        k = self._k
        return k is not None and k.shape[-2] >= length and not inference_ended(k)

    def cut(self, length: int) -> None:
        """Remove all but the first `length` tokens; 0 also removes shapes and allocated memory."""
        rule = f"the cache has {self.length} tokens, and cut keeps the first of them."
        hint = f"pass a whole number from 0 to {self.length}."
        self.length = as_count("cut got length", length, rule, hint, most=self.length)
        if not self.length:
            self._k = self._v = None
        elif self.max_length is None:
            # full, so that `append` never overwrites
            self._k, self._v = self._filled(self._k), self._filled(self._v)

    def reset(self) -> None:
        """Remove all tokens, for another batch of sequences."""
        self.cut(0)

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f" of {self.max_length}"
        shapes = "" if self.keys is None else f", keys {tuple(self.keys.shape)}"
        stored = "" if self.dtype is None else f", {self.dtype}"
        return f"KVCache({self.length}{limit} tokens{shapes}{stored})"

    def _check(self, k: Tensor, v: Tensor) -> None:
        if in_backward():
            gave = "KVCache got tokens in a backward pass, where a checkpoint recomputes a layer."
            rule = "a cache stores every token once, and recomputation would add it twice."
            raise BadValue(gave, rule, "checkpoint only layers without a cache.")
        check_type("KVCache", "k", k, Tensor)
        check_type("KVCache", "v", v, Tensor)
        if k.dim() < 2 or k.dim() != v.dim() or k.shape[:-1] != v.shape[:-1]:
            gave = f"KVCache got keys {tuple(k.shape)} and values {tuple(v.shape)}."
            rule = "every key has one value: k is (B, G, T, D) and v is (B, G, T, Dv)."
            raise BadValue(gave, rule, "pass both with the same batch, heads and length.")
        hint = "call reset() before another batch, and use one cache per layer."
        must_continue("KVCache", (k, self.keys), (v, self.values), hint)
        bounded = self.max_length is not None or self.dtype is not None
        if bounded and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            rule = "new tokens overwrite memory that gradients need, and rounded ones have none."
            hint = "decode in torch.no_grad(), or use KVCache() without max_length and dtype."
            raise BadValue(f"{self!r} got keys or values that need a gradient.", rule, hint)
        if self.max_length is None:
            return
        if self._k is not None and inference_ended(self._k):
            gave = f"KVCache(max_length={self.max_length}) was allocated in torch.inference_mode."
            rule = "new tokens are written to this memory, which torch allows only in that mode."
            raise BadValue(gave, rule, "continue in this mode, or begin in torch.no_grad().")
        if self.length + k.shape[-2] > self.max_length:
            gave = f"KVCache got {k.shape[-2]} tokens, and stores {self.length}."
            rule = f"it stores at most max_length={self.max_length} tokens."
            raise BadValue(gave, rule, "make a longer cache, or KVCache() without a limit.")


def _enlarged(stored: Tensor | None, new: Tensor, length: int) -> Tensor:
    """Copy the stored tokens to memory for `length` tokens like the `new` ones."""
    memory = new.new_empty(*new.shape[:-2], length, new.shape[-1])
    if stored is not None:
        memory[..., : stored.shape[-2], :] = stored
    return memory


Appended: TypeAlias = tuple[Tensor, Tensor | None]  # new keys or values, and the stored ones


def must_continue(cache: str, keys: Appended, values: Appended, hint: str) -> None:
    """Raise `BadValue` if new tokens differ from the stored ones in more than their number."""
    for name, (new, stored) in (("keys", keys), ("values", values)):
        if stored is not None and layout(new) != layout(stored):
            got, old = (f"{tuple(x.shape)}, {x.dtype} on {x.device}" for x in (new, stored))
            rule = "new tokens continue the same sequences, so only the length may differ."
            raise BadValue(f"{cache} got {name} of shape {got}; it stores {old}.", rule, hint)


def layout(x: Tensor) -> tuple[object, ...]:
    """Return what new tokens have in common with the stored ones."""
    return x.shape[:-2], x.shape[-1], x.dtype, x.device


def cached_length(cache: KVCache | None) -> int:
    """Return the number of tokens in the cache; 0 for None. Raises `BadType` for other types."""
    checked: KVCache | None = check_type("A layer", "cache", cache, KVCache, type(None))
    return 0 if checked is None else checked.length


@contextmanager
def restore_on_error(cache: KVCache | None) -> Iterator[None]:
    """Remove new tokens from the cache if the body of the `with` block raises."""
    length = cached_length(cache)
    try:
        yield
    except BaseException:
        if cache is not None:
            cache.cut(length)
        raise
