"""Layers of a transformers cache that write new tokens behind the stored ones.

The layers of transformers copy all stored keys and values into a new tensor at every step.
Letters: B batch, G key/value heads, T tokens, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..core.errors.limits import TOKENS_AHEAD
from ..core.problem.blocks import BlockTensor, in_blocks
from ..core.torch_state import inference_ended, is_plain
from ..nn.cache import layout, must_continue


class _Memory:
    """Memory (B, G, tokens, D) that holds the T tokens of a tensor, and has room behind them.

    `view` is that tensor, and begins at token `start`.
    """

    tensor: Tensor | None = None
    view: Tensor | None = None
    start = 0

    def append(self, stored: Tensor, new: Tensor) -> Tensor:
        """Return `stored` followed by `new`. Copy `stored` only if there is no room behind it."""
        if isinstance(stored, BlockTensor):
            return stored.with_stored(
                self.append(stored.stored, in_blocks(new, stored.format).stored)
            )
        T, t = stored.shape[-2], new.shape[-2]
        memory = self._around(stored)
        if memory is None or self.start + T + t > memory.shape[-2]:
            memory = new.new_empty(*new.shape[:-2], T + t + TOKENS_AHEAD, new.shape[-1])
            memory.narrow(-2, 0, T).copy_(stored)
            self.tensor, self.start = memory, 0
        memory.narrow(-2, self.start + T, t).copy_(new)
        self.view = memory.narrow(-2, self.start, T + t)
        return self.view

    def select(self, stored: Tensor, rows: Tensor) -> Tensor:
        """Return rows of the batch of `stored`, in this order, with the same room behind them."""
        if isinstance(stored, BlockTensor):
            return stored.with_stored(self.select(stored.stored, rows))
        memory = self._around(stored)
        if memory is None:
            return stored.index_select(0, rows)
        self.tensor = memory.index_select(0, rows)
        self.view = self.tensor.narrow(-2, self.start, stored.shape[-2])
        return self.view

    def _around(self, stored: Tensor) -> Tensor | None:
        """Return the memory if it holds `stored`, and set `start`; None if it does not."""
        memory = self.tensor
        if memory is None or inference_ended(memory):
            return None
        if stored is not self.view:  # other code shortened or replaced it
            if stored.stride() != memory.stride() or layout(stored) != layout(memory):
                return None
            token = memory.stride(-2) * memory.element_size()
            start, rest = divmod(stored.data_ptr() - memory.data_ptr(), token)
            if rest or not 0 <= start <= memory.shape[-2] - stored.shape[-2]:
                return None
            self.start = start
        return memory


class AppendingLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are views of memory with room for more tokens.

    With a format, "q8_0" or "q4_0", they are a `BlockTensor`.
    """

    keys: Any  # a Tensor, or None before the first `update`
    values: Any

    def __init__(self, format: str | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.format = format
        self._memory = _Memory(), _Memory()

    def __copy__(self) -> "AppendingLayer":
        # Both have the same tokens now, so neither may write behind them.
        self._memory = _Memory(), _Memory()
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, "_memory": (_Memory(), _Memory())}
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            x.new_empty(*x.shape[:-2], 0, x.shape[-1]) for x in (key_states, value_states)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, and return all stored keys and values."""
        self.keys, self.values = self._appended(key_states, value_states)
        return self.keys, self.values

    def _appended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        hint = "make another cache for another batch: clearhead.hf.cache(model)."
        must_continue("The cache", (k, self.keys), (v, self.values), hint)
        # Autograd may need the tokens of earlier calls, and a graph has no room behind a tensor.
        keys, values = self._memory
        if self.format is not None:
            # Other code may have read the blocks, to repeat or select texts.
            stored = (in_blocks(x, self.format) for x in (self.keys, self.values))
            return keys.append(next(stored), k), values.append(next(stored), v)
        if torch.is_grad_enabled() or not is_plain(k, v, self.keys, self.values):
            return torch.cat([self.keys, k], -2), torch.cat([self.values, v], -2)
        return keys.append(self.keys, k), values.append(self.values, v)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select and order the texts of the batch, in a beam search."""
        if self.get_seq_length() > 0:
            keys, values = self._memory
            self.keys = keys.select(self.keys, beam_idx.to(self.keys.device))
            self.values = values.select(self.values, beam_idx.to(self.values.device))

    def reset(self) -> None:
        """Remove all tokens."""
        self.keys = self.values = None  # `update` initializes the layer again
        self.is_initialized = False
        self._memory = _Memory(), _Memory()
        super().reset()


class AppendingWindowLayer(AppendingLayer, DynamicSlidingWindowLayer):
    """A `DynamicSlidingWindowLayer` like `AppendingLayer`.

    It keeps the keys that the window of the next token has, one fewer than `sliding_window`.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens; return those that their windows have."""
        keys, values = self._appended(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        window = self.sliding_window - 1
        if getattr(self, "record_past", False):  # `crop` will remove what no window has
            self.keys, self.values = keys, values
            seen = window + key_states.shape[-2]
            return _last(keys, seen), _last(values, seen)
        self.keys, self.values = _last(keys, window), _last(values, window)
        return keys, values


def _last(x: Tensor, tokens: int) -> Tensor:
    return x.narrow(-2, max(x.shape[-2] - tokens, 0), min(tokens, x.shape[-2]))
