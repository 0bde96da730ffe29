"""From a problem to a call of the C++ core.

A question becomes one packed struct (kernels/attention.h, `Problem`): addresses, strides, sizes,
and the mask as a diagonal, as runs of keys per query, or as runs and bits. Eager calls go straight
to the core; where someone watches (autograd, torch.compile, export, vmap, a dispatch mode) the same
work is the operator `clearhead::attend` (operator.py).
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import BadValue
from ...masks.key_ranges import EVERY_KEY
from ...masks.values import shared_offset
from ...problem.biases import Alibi, TensorBias
from ...problem.dropout import draw_seed
from ...problem.problem import Inputs, Problem
from ...torch_state import is_plain
from .extension import core

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The layout of `Problem`. What lies where: sizes and dtype; q, k, v, out, lse and rounding as
# (address, b, h, t). And the rule: scale and softcap; before and after, and the number of runs; lo,
# hi, bits and bias as (address, b, h, q, x); the bias's dtype; slopes and their shift; sinks;
# dropout and seed; no survey (look.py).
TENSORS = struct.Struct("=8q" + 6 * "4q")
RULE = struct.Struct("=2d" + "3q" + 4 * "5q" + "q" + "5q" + "q" + "5q" + "d2q")
NO_PLACE, NO_GRID = (0,) * 4, (0,) * 5


# ------------------------------------------------------------------- from a problem to arguments


class Asked(NamedTuple):
    """What the core is asked beside q, k and v. Query q sees the keys q - before to q + after, or,
    with `lo`, those of its runs where `bits` agree; `slopes` and `shift` are ALiBi's."""

    scale: float
    softcap: float  # 0 means none
    before: int
    after: int
    lo: Tensor | None = None
    hi: Tensor | None = None
    bits: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    shift: int = 0
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None


NO_MORE = Asked(1.0, 0.0, EVERY_KEY, EVERY_KEY)[4:]  # of a rule that is a few numbers


def question(p: Problem) -> Asked:
    before = after = EVERY_KEY
    lo = hi = bits = bias = slopes = sinks = None
    shift = 0
    if p.masked:
        # A rule of two numbers needs no tensors, which are most of the cost of a small call.
        if (diagonal := p.mask.band(p.grid)) is not None:
            before, after = diagonal
        else:
            lo, hi, bits = p.key_ranges.lo, p.key_ranges.hi, p.key_ranges.bits
    if isinstance(p.bias, TensorBias):
        bias = p.bias.as_4d()
        bias = (bias if bias.dtype in DTYPES else bias.float()).resolve_neg()
    elif isinstance(p.bias, Alibi):
        slopes = p.bias.of(p.grid).to("cpu", torch.float32).resolve_neg()
        shift = shared_offset(p.bias.align, p.grid) or 0  # a position per batch is declined
    if p.sinks is not None:
        sinks = p.sinks.float().resolve_neg()
    softcap = p.softcap or 0.0
    seed: int | Tensor | None = None
    if p.dropout:
        seed = draw_seed() if p.seed is None else p.seed
    return Asked(
        p.scale, softcap, before, after, lo, hi, bits, bias, slopes, shift, sinks, p.dropout, seed
    )


def direct(p: Problem, inputs: Inputs) -> bool:
    """May the core be called as it is: is every tensor of the question plain, and nobody about?"""
    return is_plain(*inputs, p.sinks, None if p.bias is None else p.bias.numbers)


# ----------------------------------------------------------------------- from arguments to the core


def attend(
    q: Tensor, k: Tensor, v: Tensor, asked: Asked, lse: bool, rounding: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output; with `lse` the log-sum-exp of every query, in float64; with `rounding` what was
    lost when the output was rounded to its dtype."""
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    B, H, Tq, _ = q.shape
    out = q.new_empty(B, H, Tq, v.shape[3])  # a tuple of sizes would take a microsecond longer
    sums = q.new_empty(B, H, Tq, dtype=torch.float64) if lse else None
    rest = torch.empty_like(out) if rounding else None
    check(core.attend(pack(q, k, v, out, sums, asked, rest)))
    return out, sums, rest


def pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    asked: Asked,
    rounding: Tensor | None = None,
) -> bytes:
    """The question as the core reads it. q, k and v come from `rows_of`, and must outlive it."""
    B, H, Tq, D = q.shape
    tensors = TENSORS.pack(
        B, H, k.shape[1], Tq, k.shape[2], D, v.shape[3], DTYPES[q.dtype],
        *place(q), *place(k), *place(v), *place(out), *place(lse), *place(rounding),
    )  # fmt: skip
    return tensors + (_numbers(*asked[:4]) if asked[4:] == NO_MORE else _rule(asked))


def _rule(asked: Asked) -> bytes:
    scale, softcap, before, after, lo, hi, bits, bias, slopes, shift, sinks, dropout, seed = asked
    return RULE.pack(
        scale, softcap, before, after, 0 if lo is None else lo.shape[-1],
        *grid(lo), *grid(hi), *grid(bits), *grid(bias),
        0 if bias is None else DTYPES[bias.dtype],
        *_heads(slopes), shift, *_heads(sinks), dropout, 0 if seed is None else int(seed), 0,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _numbers(scale: float, softcap: float, before: int, after: int) -> bytes:
    """A rule of numbers alone, which most questions have, and many the same."""
    return _rule(Asked(scale, softcap, before, after))


def check(code: int) -> None:
    if code:
        raise RuntimeError(
            f"the C++ core refused a question that was checked: {core.complaint(code)}"
        )


def rows_of(x: Tensor) -> Tensor:
    """The same numbers with a contiguous last dimension; any other strides may stay."""
    x = x.resolve_neg() if x.is_neg() else x
    return x if x.stride()[3] == 1 or x.shape[3] <= 1 else x.contiguous()


def place(x: Tensor | None) -> tuple[int, int, int, int]:
    """Address and strides over (b, h, t)."""
    if x is None:
        return NO_PLACE
    b, h, t = x.stride()[:3]
    return x.data_ptr() or _nowhere(x), b, h, t


def grid(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides over (b, h, q, x); a dimension of size 1 stands for all."""
    if x is None:
        return NO_GRID
    steps = zip(x.stride(), x.shape, strict=True)
    return x.data_ptr() or _nowhere(x), *(0 if size == 1 else step for step, size in steps)


def _heads(x: Tensor | None) -> tuple[int, ...]:
    return NO_GRID if x is None else (x.data_ptr() or _nowhere(x), 0, x.stride(0), 0, 0)


def _nowhere(x: Tensor) -> int:
    """The address of a tensor that has none: of no numbers, or set free."""
    if x.numel():
        raise BadValue(
            f"A tensor of shape {tuple(x.shape)} has no memory behind it.",
            "the core reads numbers where they lie.",
            "fill its storage again, if it was set free (as FSDP does outside of a layer's call).",
        )
    return 0
