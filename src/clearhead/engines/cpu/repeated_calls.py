"""Calls like an earlier one: they skip the checks, which would decide the same.

A tiny call spends most of its time in checks (5 tokens of one head: 13 us, of which the core takes
0.4). What they decide depends on the metadata of q, k and v, on the mask, the scale and the soft
cap, and on what torch does around the call. `run_and_remember` computes a call that has been
checked, without a bias, sinks or dropout, and keeps what was decided; `replay` computes the next
such call. Nothing is decided here: whatever has not been remembered takes the usual way.

A step of decoding has one query, which sees all keys but the padding before its text. One key more
decides nothing, so each step replays the one before.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...masks import Causal, Everything, Mask, prefix, window
from ...masks.key_ranges import EVERY_KEY
from ...masks.mask import Not
from ...problem.check import Options
from ...problem.problem import Inputs, Problem
from ...torch_state import in_forward_mode, is_plain, one_thread_after_fork
from ..operators import KernelArgs, with_rows
from .extension import core, level
from .pack import DTYPES, NO_TENSOR, TENSORS, args_of, check, rule

MOST = 64  # calls that are remembered
FEW_RANGES = 1 << 12  # key ranges that are kept with a call
ONE_QUERY = (1,)

Signature: TypeAlias = tuple[object, ...]
NUMBERS = {type(None), float}
COMPARED = {type(None), Everything, Causal, window}  # others are the same if they are one object


class _Call(NamedTuple):
    """A call of the core without the number of keys and the addresses of q, k, v and the output."""

    heads: tuple[int, ...]  # B, H, G, Tq
    features: tuple[int, ...]  # D, Dv, dtype
    q: tuple[int, ...]  # strides over (b, h, t), as those that follow
    k: tuple[int, ...]  # empty: contiguous
    v: tuple[int, ...]
    shape: tuple[int, ...]  # of the output
    out: tuple[int, ...]
    rule: bytes
    held: tuple[object, ...]  # the mask, whose id a signature may have, and tensors of `rule`


_calls: dict[Signature, _Call] = {}


def signature(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Signature | None:
    """What decides about a call; None where more does: gradients, tracers, a bias, ... It begins
    with whether the call is a step of decoding, and then leaves out how many keys there are."""
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
    others = q.dtype, k.dtype, v.dtype, scale, softcap, level()
    try:
        if q.shape[-2:-1] == ONE_QUERY and _decodes(q, k, v, mask):
            padding = id(mask) if type(mask) is Not else None
            return (
                True,
                q.shape,
                q.stride(),
                *_without_length(k),
                *_without_length(v),
                padding,
                *others,
            )
        sizes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    except RuntimeError:  # nested and sparse tensors have none
        return None
    return False, *sizes, mask if type(mask) in COMPARED else id(mask), *others


def _decodes(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> bool:
    """Does the only query see all keys, but for the first ones of each text?"""
    if not (k.dim() == q.dim() and k.shape[:-1] == v.shape[:-1] and k.shape[:-3] == q.shape[:-3]):
        return False
    if type(mask) is Causal:
        at = mask.align
        return at == "end" or (type(at) is int and at >= k.shape[-2] - 1)
    padded = type(mask) is Not and type(mask.mask) is prefix
    return padded or mask is None or type(mask) is Everything


def _without_length(x: Tensor) -> tuple[object, ...]:
    """Metadata of keys or values, which is the same for one more of them."""
    return x.shape[:-2], x.shape[-1], None if x.is_contiguous() else x.stride()


def replay(like: Signature, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The output, if a call of this signature was remembered; else None."""
    call = _calls.get(like)
    if call is None:
        return None
    one_thread_after_fork()
    return _run(call, q, k, v)


def run_and_remember(
    of: Signature, given: Inputs, mask: Mask | None, p: Problem, inputs: Inputs
) -> Tensor | None:
    """The output of a call that the core takes: its q, k and v as they were `given`, its mask, and
    what the checks made of them. The next call like it is replayed. None, and nothing is computed,
    where the core would read copies, or the mask tells where the queries stand by a tensor, which
    a decode may move."""
    if any(isinstance(align, Tensor) for align in p.mask.aligns()):
        return None
    for x, y in zip(given, inputs, strict=True):
        if (x is not y and x.data_ptr() != y.data_ptr()) or with_rows(y) is not y:
            return None
    decodes = of[0]
    args = _for_any_length(p) if decodes else args_of(p)
    q, k, v = (x.stride()[:3] for x in inputs)
    call = _Call(
        (p.B, p.H, p.G, p.Tq),
        (p.D, p.Dv, DTYPES[p.dtype]),
        q,
        () if decodes and given.k.is_contiguous() else k,
        () if decodes and given.v.is_contiguous() else v,
        (p.B, p.H, p.Tq, p.Dv)[4 - p.given_dims :],
        (p.H * p.Tq * p.Dv, p.Tq * p.Dv, p.Dv),
        rule(args),
        (mask, args.lo, args.hi, args.bits),
    )
    out = _run(call, *given)
    if args.bits is None and (args.lo is None or args.lo.numel() <= FEW_RANGES):
        if len(_calls) >= MOST:
            _calls.clear()
        _calls[of] = call
    return out


def _for_any_length(p: Problem) -> KernelArgs:
    """`args_of` of a step of decoding, for any number of keys: the core cuts ranges to them."""
    args = KernelArgs(p.scale, p.softcap or 0.0, EVERY_KEY, EVERY_KEY)
    if not isinstance(p.mask, Not):
        return args
    lo, _ = p.mask.bounds(p.grid, p.device) or (None, None)
    assert lo is not None
    lo = lo.unsqueeze(-1)
    return args._replace(lo=lo, hi=torch.full_like(lo, EVERY_KEY))


def _run(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if not all(addresses):  # empty, or without memory
        return None
    Tk, G, (D, Dv, _) = k.shape[-2], call.heads[2], call.features
    out = q.new_empty(*call.shape)
    tensors = TENSORS.pack(
        *call.heads, Tk, *call.features, addresses[0], *call.q,
        addresses[1], *(call.k or (G * Tk * D, Tk * D, D)),
        addresses[2], *(call.v or (G * Tk * Dv, Tk * Dv, Dv)),
        out.data_ptr(), *call.out, *NO_TENSOR, *NO_TENSOR,
    )  # fmt: skip
    check(core.attend(tensors + call.rule))
    return out
