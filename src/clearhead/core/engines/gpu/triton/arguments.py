"""Define what the kernels read: tensors with their strides, and the rule (mask, bias, dropout).

Triton passes a NamedTuple like a struct, so a kernel reads `rule.bias.q`. A field that is None is
known when the kernel is compiled, so features that are not used cost nothing.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....problem.dropout import draw_seed, keep_factor
from ....problem.problem import Problem
from ...operators import KernelArgs, kernel_args, with_rows

LOG2E = 1 / math.log(2.0)
FAR = 2**30 - 1  # exceeds every distance; the sum with a position still fits into 32 bits
FARTHEST_ROWS = 2**23  # in numbers; 256 rows still fit into 32 bits


def args_of(p: Problem) -> KernelArgs:
    """Return the arguments of a problem besides q, k and v, on its device."""
    if not p.dropout:
        return kernel_args(p, None)
    if p.seed is None:
        return kernel_args(p, draw_seed(p.device))
    return kernel_args(p, torch.full((1,), p.seed, dtype=torch.long, device=p.device))


# --------------------------------------------------------------------------- as the kernels read it


class Sizes(NamedTuple):
    """The sizes of a problem besides the head sizes."""

    B: int
    H: int
    G: int
    Tq: int
    Tk: int


class Rows(NamedTuple):
    """The address and strides of a (B, H, T, D) tensor whose last dimension is contiguous.

    `even` is 1 if the offsets of all rows are multiples of 16 bytes, else None. Triton detects only
    strides that are multiples of 16 numbers; without `even`, heads of size 72 would not be read by
    wide loads.
    """

    at: Any
    b: int
    h: int
    t: int
    even: int | None


class Cells(NamedTuple):
    """The address and strides of a (B, H, Tq, x) tensor; 0 where a dimension of size 1
    broadcasts."""

    at: Any
    b: int
    h: int
    q: int
    k: int


class KernelRule(NamedTuple):
    """`KernelArgs` as the kernels read it. Logits have their own unit: the power of a logit x is
    exp2(x * unit). If only a scale is applied, the logits are the unscaled products q k."""

    unit: float
    natural: float  # a logit x in nats is x * natural
    scale: float | None  # of q k; with a soft cap, what goes into tanh
    cap: float | None
    before: int
    after: int
    lo: Cells | None
    hi: Cells | None
    ranges: int
    bits: Cells | None
    bias: Cells | None
    slopes: Any
    shift: int
    sinks: Any
    seed: Any
    drop_below: int  # a cell with a smaller 32-bit hash is dropped
    keep_factor: float
    careful: int | None = None  # 1: NaN and infinity reach only the rows that see them (repair.py)


def kernel_rule(rule: KernelArgs) -> KernelRule:
    """Convert the arguments to what the kernels read."""
    if rule.lo is rule.bias is rule.slopes is rule.sinks is rule.seed is None:
        return _numbers(*rule[:4])
    return _kernel_rule(rule)


@lru_cache(maxsize=64)
def _numbers(scale: float, softcap: float, before: int, after: int) -> KernelRule:
    """Convert arguments without tensors. It is cached, because many calls have the same numbers."""
    return _kernel_rule(KernelArgs(scale, softcap, before, after))


def _kernel_rule(rule: KernelArgs) -> KernelRule:
    capped = rule.softcap != 0.0
    # If the scale is positive, the largest product is the largest logit, also after rounding. With
    # a unit above 1 it could overflow to infinity, and all weights would be 0.
    bare = not capped and 1e-30 < rule.scale <= 1 / LOG2E
    bare = bare and rule.bias is None and rule.slopes is None and rule.sinks is None
    return KernelRule(
        unit=rule.scale * LOG2E if bare else LOG2E,
        natural=rule.scale if bare else 1.0,
        scale=None if bare else rule.scale / rule.softcap if capped else rule.scale,
        cap=rule.softcap if capped else None,
        before=max(-FAR, min(rule.before, FAR)),
        after=max(-FAR, min(rule.after, FAR)),
        lo=cells_if(rule.lo),
        hi=cells_if(rule.hi),
        ranges=1 if rule.lo is None else rule.lo.shape[-1],
        bits=None if rule.bits is None else cells(rule.bits.view(torch.uint8)),
        bias=cells_if(rule.bias),
        slopes=None if rule.slopes is None else rule.slopes.contiguous(),
        shift=max(-FAR, min(rule.shift, FAR)),
        sinks=None if rule.sinks is None else rule.sinks.contiguous(),
        seed=rule.seed,
        drop_below=round(rule.dropout * 2**32),
        keep_factor=keep_factor(rule.dropout),
    )


def sizes_of(q: Tensor, k: Tensor) -> Sizes:
    B, H, Tq, _ = q.shape
    return Sizes(B, H, k.shape[1], Tq, k.shape[2])


def readable(x: Tensor) -> Tensor:
    """Return the same numbers with a contiguous last dimension, and with rows so near that those of
    a tile are addressed in 32 bits (tile.py)."""
    x = with_rows(x)
    return x.contiguous() if abs(x.stride(2)) >= FARTHEST_ROWS else x


def rows(x: Tensor) -> Rows:
    """Return the view of a tensor from `readable`."""
    b, h, t, _ = x.stride()
    return Rows(x, b, h, t, None if (b | h | t) * x.element_size() % 16 else 1)


def described(x: Tensor, tile: tuple[int, int]) -> Rows | TensorDescriptor:
    """Return a descriptor of a tensor from `readable`, by which tiles of rows are copied (TMA).

    It is for capability 9.0 and later. Then one thread starts the copy of a tile, and no registers
    hold its addresses. Values are those of `rows`, which is returned if the layout does not allow
    a descriptor: addresses and strides must be multiples of 16 bytes, and no dimension broadcasts.
    """
    wide = 16 // x.element_size()
    # The stride of a dimension of size 1 has no meaning.
    strides = [wide if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)][:-1]
    if not x.numel() or x.data_ptr() % 16 or any(step % wide or step == 0 for step in strides):
        return rows(x)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, *tile])


def cells(x: Tensor) -> Cells:
    """Return the view of a tensor, with stride 0 where a dimension has size 1."""
    steps = zip(x.stride(), x.shape, strict=True)
    return Cells(x, *(0 if size == 1 else step for step, size in steps))


def cells_if(x: Tensor | None) -> Cells | None:
    return None if x is None else cells(x)
