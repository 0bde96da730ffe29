"""Calls like an earlier one: they skip the checks, which would decide the same.

A tiny call spends most of its time in checks (5 tokens of one head: 13 us, of which the core takes
0.4). What they decide depends on the metadata of q, k and v, on the mask, the scale and the soft
cap, and on what torch does around the call. `remember` keeps it for calls that the core computes
without a bias, sinks or dropout; `replay` computes the next such call. Nothing is decided here:
whatever has not been remembered takes the usual way.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...masks import Causal, Everything, Mask, window
from ...problem.check import Options
from ...problem.problem import Inputs, Problem
from ...torch_state import in_forward_mode, is_plain, one_thread_after_fork
from .extension import core, level
from .pack import DTYPES, NO_TENSOR, TENSORS, check, kernel_args, rule, with_rows

MOST = 64  # calls that are remembered; a decode adds one a step
FEW = 1 << 12  # key ranges that are kept with a call

Signature: TypeAlias = tuple[object, ...]
NUMBERS = {type(None), float}
COMPARED = {type(None), Everything, Causal, window}  # others are the same if they are one object


class _Call(NamedTuple):
    """All of a call of the core but for the addresses of q, k, v and the output."""

    sizes: tuple[int, ...]
    q: tuple[int, ...]  # strides over (b, h, t), as those that follow
    k: tuple[int, ...]
    v: tuple[int, ...]
    shape: tuple[int, ...]  # of the output
    out: tuple[int, ...]
    rule: bytes
    held: tuple[object, ...]  # the mask, whose id a signature may have, and tensors of `rule`


_calls: dict[Signature, _Call] = {}


def signature(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Signature | None:
    """What decides about a call; None where more does: gradients, tracers, a bias, ..."""
    mask, bias, scale, softcap, sinks, dropout, seed = options
    if not (bias is sinks is seed is None and type(dropout) is float and dropout == 0.0):
        return None
    if not (type(scale) in NUMBERS and type(softcap) in NUMBERS):
        return None
    if q is None or k is None or v is None or not is_plain(q, k, v) or in_forward_mode():
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    try:
        sizes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    except RuntimeError:  # nested and sparse tensors have none
        return None
    rule = mask if type(mask) in COMPARED else id(mask)
    return *sizes, q.dtype, k.dtype, v.dtype, rule, scale, softcap, level()


def replay(like: Signature, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The output, if a call of this signature was remembered; else None."""
    call = _calls.get(like)
    if call is None:
        return None
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not all(addresses):  # empty, or without memory
        return None
    one_thread_after_fork()
    out = q.new_empty(*call.shape)
    tensors = TENSORS.pack(
        *call.sizes, addresses[0], *call.q, addresses[1], *call.k, addresses[2], *call.v,
        out.data_ptr(), *call.out, *NO_TENSOR, *NO_TENSOR,
    )  # fmt: skip
    check(core.attend(tensors + call.rule))
    return out


def remember(
    of: Signature,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    problem: Problem,
    inputs: Inputs,
) -> None:
    """Remember a call that the core computed: q, k and v as they were given, and `inputs`, what the
    checks made of them. Not where the core reads copies, or the mask needs large tensors, or one
    that tells where the queries stand, which a decode may move."""
    p, given = problem, (q, k, v)
    if any(isinstance(align, Tensor) for align in p.mask.aligns()):
        return
    if any(
        x.data_ptr() != y.data_ptr() for x, y in zip(given, map(with_rows, inputs), strict=True)
    ):
        return
    args = kernel_args(p)
    if args.bits is not None or (args.lo is not None and args.lo.numel() > FEW):
        return
    if len(_calls) >= MOST:
        _calls.clear()
    strides_q, strides_k, strides_v = (x.stride()[:3] for x in inputs)
    _calls[of] = _Call(
        (p.B, p.H, p.G, p.Tq, p.Tk, p.D, p.Dv, DTYPES[p.dtype]),
        strides_q,
        strides_k,
        strides_v,
        (p.B, p.H, p.Tq, p.Dv)[4 - p.rank :],
        (p.H * p.Tq * p.Dv, p.Tq * p.Dv, p.Dv),
        rule(args),
        (mask, args.lo, args.hi),
    )
