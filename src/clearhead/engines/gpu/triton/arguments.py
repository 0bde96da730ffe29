"""What the kernels read: tensors with their strides, and the rule (mask, bias, dropout).

Triton passes a NamedTuple as it is, so a kernel reads `rule.bias.q` where C would read a struct.
None in a field is known when the kernel is compiled: what was not asked costs nothing.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....problem.dropout import draw_seed, keep_factor
from ....problem.problem import Problem
from ...operators import KernelArgs, kernel_args

LOG2E = 1 / math.log(2.0)
FAR = 2**30 - 1  # no distance is larger, and the sum of it and a position stays in 32 bits


def args_of(p: Problem) -> KernelArgs:
    """The problem but for its tensors q, k and v, on its device."""
    if not p.dropout:
        return kernel_args(p, None)
    if p.seed is None:
        return kernel_args(p, draw_seed(p.device))
    return kernel_args(p, torch.full((1,), p.seed, dtype=torch.long, device=p.device))


# --------------------------------------------------------------------------- as the kernels read it


class Sizes(NamedTuple):
    B: int
    H: int
    G: int
    Tq: int
    Tk: int


class Rows(NamedTuple):
    """A (B, H, T, D) tensor whose last dimension is contiguous: address and strides. `even`, 1 or
    None, says whether all rows begin at a multiple of 16 bytes from the first. Triton sees for
    itself only that a stride is a multiple of 16 numbers, and heads of 72 would lose their wide
    loads."""

    at: Any
    b: int
    h: int
    t: int
    even: int | None


class Cells(NamedTuple):
    """A (B, H, Tq, x) tensor: address and strides, 0 where a dimension of size 1 broadcasts."""

    at: Any
    b: int
    h: int
    q: int
    k: int


class KernelRule(NamedTuple):
    """`KernelArgs` as the kernels read it. Logits are in a unit of their own: a logit x counts as
    exp2(x * unit). Where nothing is done to them, they are the products q k as they come."""

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
    drop_below: int  # a cell is dropped whose 32-bit hash is below
    keep_factor: float


def kernel_rule(rule: KernelArgs) -> KernelRule:
    if rule.lo is rule.bias is rule.slopes is rule.sinks is rule.seed is None:
        return _numbers(*rule[:4])
    return _kernel_rule(rule)


@lru_cache(maxsize=64)
def _numbers(scale: float, softcap: float, before: int, after: int) -> KernelRule:
    """Most problems have no tensors there, and many the same numbers."""
    return _kernel_rule(KernelArgs(scale, softcap, before, after))


def _kernel_rule(rule: KernelArgs) -> KernelRule:
    capped = rule.softcap != 0.0
    # The largest product is the largest logit if the scale is positive, also when rounded. A unit
    # above 1 could make an infinity of it, and all weights 0.
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


def rows(x: Tensor) -> Rows:
    """Of a tensor from `with_rows`."""
    b, h, t, _ = x.stride()
    return Rows(x, b, h, t, None if (b | h | t) * x.element_size() % 16 else 1)


def cells(x: Tensor) -> Cells:
    steps = zip(x.stride(), x.shape, strict=True)
    return Cells(x, *(0 if size == 1 else step for step, size in steps))


def cells_if(x: Tensor | None) -> Cells | None:
    return None if x is None else cells(x)
