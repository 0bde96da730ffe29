"""Hold one attention call as data, after its arguments are checked (`check.py`).

The letters, everywhere in clearhead (docstrings, errors, C++, JavaScript):

    B batch            H query heads    G key/value heads
    Tq queries         Tk keys
    D head dimension        Dv value size

H is a multiple of G, and query head i reads KV head i // (H // G). Queries are (B, H, Tq, D), keys
(B, G, Tk, D), values (B, G, Tk, Dv), with any strides. Leading dimensions may be missing from all
three alike, so a single (Tq, D) works. A batch of size 1 broadcasts.

The order of steps is: S = scale * Q K^T, soft cap, + bias, mask, softmax (in fp32 or wider),
dropout, @ V. A fully masked query gets output 0 and weights 0. The log-sum-exp is natural, in fp32
(fp64 for fp64). Sinks are extra logits per head that take weight and add no value.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..masks import Everything, Grid, Mask, everything
from ..masks.key_ranges import KeyRanges
from . import nan_safe
from .biases import Bias
from .dropout import factors

Value = TypeVar("Value")


class Inputs(NamedTuple):
    """The tensors with all dimensions: (B, H, Tq, D), (B, G, Tk, D), (B, G, Tk, Dv)."""

    q: Tensor
    k: Tensor
    v: Tensor


class cached(Generic[Value]):
    """A functools.cached_property without the lock that it has before Python 3.12.

    It caches nothing while torch.compile traces, because a graph must not contain the tensors of
    another call.
    """

    def __init__(self, make: Callable[[Any], Value]):
        self.make, self.__doc__ = make, make.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> Value:
        if owner is None:
            return self  # type: ignore[return-value]  # help() reads it from the class
        value = self.make(owner)
        if not torch.compiler.is_compiling():
            owner.__dict__[self.make.__name__] = value
        return value


# Treat it as frozen. Making a frozen dataclass takes 1 us longer, a tenth of a small call.
@dataclass(eq=False)
class Problem:
    """One attention problem: sizes, dtype, device, mask, bias, sinks and numbers, without q, k, v.

    So engines can accept or decline it, and `plan` can compute its costs, without reading data.
    """

    B: int
    H: int
    G: int
    Tq: int
    Tk: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device
    mask: Mask
    bias: Bias | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    seed: int | None
    grad: bool
    input_dims: int  # the dimensions of the caller's q, k and v; `Inputs` have four

    @property
    def grid(self) -> Grid:
        return Grid(self.Tq, self.Tk, self.B, self.H)

    @property
    def masked(self) -> bool:
        return not isinstance(self.mask, Everything)

    @cached
    def key_ranges(self) -> KeyRanges:
        """The mask as key ranges, on the problem's device, or on the CPU for meta tensors."""
        meta = self.device.type == "meta"
        return self.mask.key_ranges(self.grid, torch.device("cpu") if meta else self.device)

    def fully_masked(self) -> Tensor:
        """Return which queries may look at no key, (B|1, H|1, Tq)."""
        if (band := self.mask.band(self.grid)) is None:
            return self.key_ranges.keys_per_query() == 0
        before, after = band
        masked = torch.ones(1, 1, self.Tq, dtype=torch.bool, device=self.device)
        if before + after >= 0:
            masked[..., max(0, -after) : max(0, self.Tk + before)] = False
        return masked

    @cached
    def without_mask(self) -> "Problem":
        """The same problem without its mask, for tiles in which the mask allows every pair."""
        return replace(self, mask=everything)

    @property
    def records_grad(self) -> bool:
        """Does autograd record now, and did it when the problem was made (`grad`)?"""
        return self.grad and torch.is_grad_enabled()

    def with_zero_grad(self, x: Tensor, *inputs: Tensor) -> Tensor:
        """Return `x` with a gradient of 0 to the inputs, the sinks and the bias."""
        bias = None if self.bias is None else self.bias.numbers
        sources = (y for y in (*inputs, self.sinks, bias) if y is not None)
        return x + sum(y.flatten()[:0].sum() for y in sources)

    @property
    def without_dropout(self) -> "Problem":
        """The same problem without dropout, for statistics of the weights."""
        return replace(self, dropout=0.0, seed=None) if self.dropout else self

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which softmax is computed: fp32, or fp64 for fp64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def all_pairs(self) -> int:
        """The number of (query, key) pairs, including masked ones: B H Tq Tk."""
        return self.B * self.H * self.Tq * self.Tk

    @cached
    def pairs(self) -> int:
        """The number of (query, key) pairs that the mask allows, over all batches and heads."""
        if not self.masked:
            return self.all_pairs
        return int(self.key_ranges.keys_per_query().expand(self.B, self.H, self.Tq).sum())

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, over the allowed pairs."""
        return 2 * self.pairs * (self.D + self.Dv)

    @property
    def bytes(self) -> int:
        """The least number of bytes to move, each once.

        It counts the queries, the keys and values that at least one query sees, and the output.
        """
        keys = self.B * self.G * self.Tk
        if self.masked:
            seen = self.key_ranges.keys_seen()
            if seen.shape[1] > 1:  # a key is read once for all heads of its group
                seen = seen.unflatten(1, (self.G, -1)).any(2)
            keys = int(seen.expand(self.B, self.G, self.Tk).sum())
        return self.dtype.itemsize * (keys + self.B * self.H * self.Tq) * (self.D + self.Dv)

    def describe(self) -> str:
        """Describe the problem in a line."""
        heads = f"H={self.H}" if self.G == self.H else f"H={self.H} G={self.G}"
        size = f"D={self.D}" if self.D == self.Dv else f"D={self.D} Dv={self.Dv}"
        sizes = f"B={self.B} {heads} Tq={self.Tq} Tk={self.Tk} {size}"
        parts = [f"{sizes}, {self.dtype_name} on {self.device}"]
        if self.masked:
            mask = repr(self.mask)
            parts.append(f"mask {mask if len(mask) <= 80 else mask[:77] + '...'}")
        if self.bias is not None:
            parts.append(f"{self.bias!r}")
        if self.softcap is not None:
            parts.append(f"softcap {self.softcap:g}")
        if self.sinks is not None:
            parts.append("sinks")
        if self.dropout:
            seed = "torch's generator" if self.seed is None else f"seed {self.seed}"
            parts.append(f"dropout {self.dropout:g} by {seed}")
        if self.grad:
            parts.append("with gradient")
        return ", ".join(parts)

    # The methods below compute a block of the attention matrix, for tiles, rows, columns and
    # shards. `engines/reference.py` computes the same step by step.

    def logits(
        self, q: Tensor, k: Tensor, queries: slice, keys: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the input of softmax for a block, (B, H, q, k), and return it with the mask.

        `q` (B, H, q, D) and `k` (B, G or H, k, D) are those of the block. The block of the mask is
        None if the problem has no mask.
        """
        q, k = q.to(self.wide), repeat_heads(k.to(self.wide), self.H)
        keep = self.key_ranges.to_bool(queries, keys) if self.masked else None
        scores = nan_safe.scores(q, k, keep) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias.block(self.grid, queries, keys, scores)
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        return scores, keep

    def survivors(self, queries: slice, keys: slice) -> Tensor:
        """Compute the dropout factors of a block from the seed: 1 / (1 - p), or 0 if dropped."""
        assert self.seed is not None
        b, h, q, k = (
            torch.arange(size, device=self.device) for size in (self.B, self.H, self.Tq, self.Tk)
        )
        return factors(self.seed, self.dropout, b, h, q[queries], k[keys], self.wide)

    def widen(self, inputs: Inputs) -> Inputs:
        """Convert the inputs to the wide dtype, and repeat the keys and values to H heads."""
        q, k, v = (x.to(self.wide) for x in inputs)
        return Inputs(q, repeat_heads(k, self.H), repeat_heads(v, self.H))

    def shape_back(self, out: Tensor) -> Tensor:
        """Remove the leading dimensions that the caller's tensors did not have."""
        return out if self.input_dims == 4 else out.reshape(out.shape[4 - self.input_dims :])


def repeat_heads(x: Tensor, H: int) -> Tensor:
    """Repeat each KV head H // G times in a row: (B, G, T, d) -> (B, H, T, d)."""
    B, G, T, d = x.shape
    if G == H:
        return x
    return x.unsqueeze(2).expand(B, G, H // G, T, d).reshape(B, H, T, d)
