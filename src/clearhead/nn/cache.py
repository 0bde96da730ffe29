"""The KV cache: keys and values of the tokens so far, which new tokens need not compute again.

Letters: B batch, G key/value heads, T tokens, D head size, Dv value size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import BadValue, as_count
from ..errors.limits import TOKENS_AHEAD
from ..functional.sharding import cached_part
from ..torch_state import in_backward, is_plain
from .checks import check_size, check_type


class KVCache:
    """Holds the keys (B, G, T, D) and values (B, G, T, Dv) of one attention layer.

    `length` is the number of tokens held, `cut(n)` keeps the first n of them and `reset()` none.
    Each layer has a cache of its own. `max_length` allocates memory for so many tokens at the first
    `append`, and later tokens are written into it. None means no limit: memory is reserved for 256
    tokens more than there are, again and again; under autograd, and while torch is compiling or
    transforming, each `append` copies instead.

    In `distributed.sharded` a cache holds the tokens of its rank, and `length` counts these.

    A beam search continues with some of its sequences, in another order: ``kept = KVCache()``, then
    ``kept.append(cache.keys[order], cache.values[order])``.

    Raises `BadValue` for keys and values that do not fit together or to those held, for more than
    `max_length` tokens, for keys that require a gradient where `max_length` is given, and in a
    backward pass, when activation checkpointing computes a layer again.
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None:
            max_length = check_size("KVCache", "max_length", max_length)
        self.max_length = max_length
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._owner: int | None = None

    @property
    def keys(self) -> Tensor | None:
        """The keys held, (B, G, length, D); None before the first `append`."""
        return None if self._k is None else self._k[..., : self.length, :]

    @property
    def values(self) -> Tensor | None:
        """The values held, (B, G, length, Dv); None before the first `append`."""
        return None if self._v is None else self._v[..., : self.length, :]

    def belongs_to(self, layer: nn.Module) -> None:
        """Remember the layer that fills this cache. Raises `BadValue` if another layer has."""
        if torch.compiler.is_compiling():  # the graph would be guarded on the identity of the layer
            return
        if self.length and self._owner not in (None, id(layer)):
            raise BadValue(
                f"{type(layer).__name__} got a {self!r} that another layer has filled.",
                "each layer has keys and values of its own, so it has a cache of its own.",
                "make one per layer, for example caches = [KVCache() for _ in blocks]; for a copy "
                "of the layer, copy.deepcopy the cache, too.",
            )
        self._owner = id(layer)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_owner": None}  # a copy may be used by a copy of the layer

    def __copy__(self) -> "KVCache":
        other = KVCache(self.max_length)
        other.__dict__.update(self.__getstate__())
        if other.max_length is not None and self._k is not None and self._v is not None:
            other._k, other._v = self._k.clone(), self._v.clone()  # it writes into its own memory
        else:
            other._k, other._v = self.keys, self.values  # without room: it will not write into ours
        return other

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns all keys and all values held."""
        self._check(k, v)
        k, v = cached_part(k), cached_part(v)
        length = self.length + k.shape[-2]
        if self.max_length is None and (torch.is_grad_enabled() or not is_plain(k, v, self._k)):
            self._k = k.clone() if self.keys is None else torch.cat([self.keys, k], -2)
            self._v = v.clone() if self.values is None else torch.cat([self.values, v], -2)
        else:
            if not self._has_room(length):
                most = length + TOKENS_AHEAD if self.max_length is None else self.max_length
                self._k, self._v = _copied(self.keys, k, most), _copied(self.values, v, most)
            assert self._k is not None and self._v is not None
            self._k[..., self.length : length, :] = k
            self._v[..., self.length : length, :] = v
        self.length = length
        return self._k[..., :length, :], self._v[..., :length, :]

    def _has_room(self, length: int) -> bool:
        k = self._k
        return k is not None and k.shape[-2] >= length and not _inference_ended(k)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens; with 0, shapes and allocated memory too."""
        self.length = as_count(
            "cut was asked for length",
            length,
            f"the cache holds {self.length} tokens, and cutting keeps the first of them.",
            f"pass a whole number from 0 to {self.length}.",
            most=self.length,
        )
        if not self.length:
            self._k = self._v = None
        elif self.max_length is None:
            self._k, self._v = self.keys, self.values  # without room: who holds the rest keeps it

    def reset(self) -> None:
        """Forget everything, for another batch of sequences."""
        self.cut(0)

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f" of {self.max_length}"
        shapes = "" if self.keys is None else f", keys {tuple(self.keys.shape)}"
        return f"KVCache({self.length}{limit} tokens{shapes})"

    def _check(self, k: Tensor, v: Tensor) -> None:
        if in_backward():
            raise BadValue(
                "KVCache got tokens in a backward pass, where a checkpoint computes again.",
                "a cache takes every token once, and computing again would add it twice.",
                "checkpoint only layers without a cache.",
            )
        check_type("KVCache", "k", k, Tensor)
        check_type("KVCache", "v", v, Tensor)
        if k.dim() < 2 or k.dim() != v.dim() or k.shape[:-1] != v.shape[:-1]:
            raise BadValue(
                f"KVCache got keys {tuple(k.shape)} and values {tuple(v.shape)}.",
                "every key has one value: k is (B, G, T, D) and v is (B, G, T, Dv).",
                "give both the same batch, heads and length.",
            )
        for name, new, held in (("keys", k, self.keys), ("values", v, self.values)):
            if held is not None and _layout(new) != _layout(held):
                raise BadValue(
                    f"KVCache got {name} of shape {tuple(new.shape)}, {new.dtype} on {new.device}; "
                    f"it holds {tuple(held.shape)}, {held.dtype} on {held.device}.",
                    "new tokens continue the same sequences: all but the length stays as it was.",
                    "call reset() before another batch, and keep one cache per layer.",
                )
        if self.max_length is None:
            return
        if self._k is not None and _inference_ended(self._k):
            raise BadValue(
                f"KVCache(max_length={self.max_length}) was begun under torch.inference_mode.",
                "new tokens are written into reserved room, and what was made in that mode is "
                "written to in that mode only.",
                "go on under torch.inference_mode(), or begin under torch.no_grad().",
            )
        if self.length + k.shape[-2] > self.max_length:
            raise BadValue(
                f"KVCache got {k.shape[-2]} more tokens and holds {self.length}.",
                f"it has room for max_length={self.max_length}.",
                "build a longer cache, or KVCache() without a limit.",
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise BadValue(
                f"KVCache(max_length={self.max_length}) got keys or values that need a gradient.",
                "new tokens are written over reserved room, and a gradient would need what was "
                "there before.",
                "decode under torch.no_grad(), or use KVCache() without max_length.",
            )


def _inference_ended(x: Tensor) -> bool:
    """Is it a tensor of torch.inference_mode, used outside of that mode?"""
    return (
        not torch.compiler.is_compiling()
        and x.is_inference()
        and not torch.is_inference_mode_enabled()
    )


def _copied(held: Tensor | None, new: Tensor, length: int) -> Tensor:
    """What is held, in memory for `length` tokens like the `new` ones."""
    room = new.new_empty(*new.shape[:-2], length, new.shape[-1])
    if held is not None:
        room[..., : held.shape[-2], :] = held
    return room


def _layout(x: Tensor) -> tuple[object, ...]:
    return x.shape[:-2], x.shape[-1], x.dtype, x.device


def cached_length(cache: KVCache | None) -> int:
    """How many tokens the cache holds; 0 without one. Raises `BadType` for anything else."""
    held: KVCache | None = check_type("A layer", "cache", cache, KVCache, type(None))
    return 0 if held is None else held.length


@contextmanager
def restore_on_error(cache: KVCache | None) -> Iterator[None]:
    """If the body raises, the cache is cut back to the tokens it held before."""
    held = cached_length(cache)
    try:
        yield
    except BaseException:
        if cache is not None:
            cache.cut(held)
        raise
