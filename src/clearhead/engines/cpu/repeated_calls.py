"""Calls like an earlier one: they skip the checks, which would decide the same.

A tiny call spends most of its time in checks (5 tokens of one head: 30 us on a Zen 3, of which the
core takes 0.7). What they decide depends on the layouts of q, k and v, on the mask, the scale and
the soft cap, and on what torch does around the call. `run_and_remember` computes a call that has
been checked, without a bias, sinks or dropout, and keeps what was decided; `replay` computes the
next such call. Nothing is decided here: whatever has not been remembered takes the usual way, and
where torch does not show its tensors to C, every call does.

A step of decoding has one query, which sees all keys but the padding before its text. One key more
decides nothing, so each step replays the one before.
"""

from typing import NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack

from ...errors.limits import MOST_REPEATED_CALLS, MOST_REPEATED_RANGES
from ...masks import Causal, Everything, Mask, prefix, window
from ...masks.key_ranges import UNLIMITED
from ...masks.mask import Not
from ...problem.problem import Inputs, Problem
from ...torch_state import (
    in_forward_mode,
    is_intercepted,
    is_plain,
    one_thread_after_fork,
)
from ..operators import KernelArgs, with_rows
from .extension import core, level
from .pack import DTYPES, NO_TENSOR, TENSORS, args_of, check, rule

NO_KEY = -1

Signature: TypeAlias = tuple[object, ...]
NUMBERS = {type(None), float}


class _Call(NamedTuple):
    """A call of the core without the number of keys and the addresses of q, k, v and the output."""

    problem: bytes
    shape: tuple[int, ...]  # of the output
    held: tuple[object, ...]  # tensors of `problem`, and a reference to a mask told by its id


_calls: dict[Signature, _Call] = {}


def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Signature | None:
    """What decides about an eager call without a bias, sinks and dropout; None where more does:
    gradients, tracers, ... It begins with whether the call is a step of decoding, and then leaves
    out how many keys there are."""
    if not (type(scale) in NUMBERS and type(softcap) in NUMBERS):
        return None
    if core is None or is_intercepted() or in_forward_mode():
        return None
    if mask is not None and not isinstance(mask, Mask):  # `make_problem` refuses it
        return None
    mask_key, last_key = _key_of(mask)
    layouts = core.layouts(q, k, v, last_key)
    if layouts is None:
        return None
    decodes, like = layouts
    if decodes and type(mask) is Causal:
        mask_key = None  # it hides nothing from this query
    return decodes, like, mask_key, scale, softcap, level()


def _key_of(mask: Mask | None) -> tuple[object, int]:
    """A key for this mask, and the last key that a single query sees if it sees all before it
    (padding in front aside); NO_KEY where that is not known. Masks that models make anew for each
    call are compared by value, others by identity and how often their tensors were changed."""
    if mask is None or type(mask) is Everything:
        return None, UNLIMITED
    if type(mask) is Causal and not isinstance(align := mask.align, Tensor):
        last_key = UNLIMITED if align == "end" else align if type(align) is int else NO_KEY
        return (Causal, align), last_key
    if type(mask) is window and not isinstance(mask.align, Tensor):
        return (window, mask.before, mask.after, mask.align), NO_KEY
    padded = type(mask) is Not and type(mask.mask) is prefix
    return (id(mask), mask.version()), UNLIMITED if padded else NO_KEY


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
    where the core would read copies, the mask tells where the queries stand by a tensor, which a
    decode may move, or it was made of gradients that are batched."""
    if not is_plain() or any(isinstance(align, Tensor) for align in p.mask.aligns()):
        return None
    for x, y in zip(given, inputs, strict=True):
        if (x is not y and x.data_ptr() != y.data_ptr()) or with_rows(y) is not y:
            return None
    decodes, by_id = of[0], type(of[2]) is tuple and type(of[2][0]) is int
    args = _for_any_length(p) if decodes else args_of(p)
    sizes = p.B, p.H, p.G, p.Tq, p.Tk, p.D, p.Dv, DTYPES[p.dtype]
    call = _Call(
        TENSORS.pack(*sizes, *6 * NO_TENSOR) + rule(args),
        (p.B, p.H, p.Tq, p.Dv)[4 - p.given_dims :],
        (args.lo, args.hi, args.bits, ref(mask, lambda _: _forget(of)) if by_id else None),
    )
    out = _run(call, *given)
    if args.bits is None and (args.lo is None or args.lo.numel() <= MOST_REPEATED_RANGES):
        if len(_calls) >= MOST_REPEATED_CALLS:
            _calls.clear()
        _calls[of] = call
    return out


def _forget(like: Signature) -> None:
    """A mask is gone, and another one may get its id."""
    _calls.pop(like, None)


def _for_any_length(p: Problem) -> KernelArgs:
    """`args_of` of a step of decoding, for any number of keys: the core cuts ranges to them."""
    args = KernelArgs(p.scale, p.softcap or 0.0, UNLIMITED, UNLIMITED)
    if not isinstance(p.mask, Not):
        return args
    lo, _ = p.mask.bounds(p.grid, p.device) or (None, None)
    assert lo is not None
    lo = lo.unsqueeze(-1)
    return args._replace(lo=lo, hi=torch.full_like(lo, UNLIMITED))


def _run(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if _len_torch_function_stack():
        with torch._C.DisableTorchFunction():  # a mode might return another output
            out = q.new_empty(*call.shape)
    else:
        out = q.new_empty(*call.shape)  # a tuple of sizes would take a microsecond longer
    if code := core.attend_tensors(call.problem, q, k, v, out):
        check(code)
    return out
