"""Skip the checks of a call that is like an earlier one.

A small call spends most of its time in checks: 5 tokens of one head take 30 us on a Zen 3, of which
the core takes 0.7. The result of the checks depends on the layouts of q, k and v, on the mask,
scale and soft cap, and on torch's state. `run_and_remember` computes a checked call without bias,
sinks and dropout, and stores it by its signature. `replay` computes the next call of this
signature. Any other call is checked as usual; so is every call, if torch cannot pass tensors to C.

A step of decoding has one query, which sees all keys except padding before its text. Its signature
does not contain the number of keys, so each step replays the one before.
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

NOT_KNOWN = -1
INVALID = object()

Signature: TypeAlias = tuple[object, ...]
NUMBERS = {type(None), float}


class _Call(NamedTuple):
    """A packed call of the core, without the number of keys and the addresses of q, k, v and the
    output."""

    problem: bytes
    shape: tuple[int, ...]  # of the output
    references: tuple[object, ...]  # tensors of `problem`, and a weak reference to the mask


_calls: dict[Signature, _Call] = {}


def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Signature | None:
    """Return a key for all that the checks of an eager call depend on, without bias, sinks and
    dropout.

    None if they depend on more: gradients, tracers, ... The first item is true for a step of
    decoding; then the number of keys is left out.
    """
    if not (type(scale) in NUMBERS and type(softcap) in NUMBERS):
        return None
    if core is None or is_intercepted() or in_forward_mode():
        return None
    mask_key, last_key = _key_of(mask)
    layouts = None if mask_key is INVALID else core.layouts(q, k, v, last_key)
    if layouts is None:
        return None
    decodes, like = layouts
    if decodes and type(mask) is Causal:
        mask_key = None  # it hides no key from this query
    return decodes, like, mask_key, scale, softcap, level()


def _key_of(mask: Mask | None) -> tuple[object, int]:
    """Return a key for this mask, and the last key of a single query that sees all earlier keys
    except padding in front; NOT_KNOWN if the query may not see them.

    Masks that models create for each call are compared by value. Other masks are compared by
    identity and by a count of the changes of their tensors. Another object gets INVALID, and
    `make_problem` refuses it.
    """
    if mask is None or type(mask) is Everything:
        return None, UNLIMITED
    if type(mask) is Causal and not isinstance(align := mask.align, Tensor):
        last_key = UNLIMITED if align == "end" else align if type(align) is int else NOT_KNOWN
        return (Causal, align), last_key
    if type(mask) is window and not isinstance(mask.align, Tensor):
        return (window, mask.before, mask.after, mask.align), NOT_KNOWN
    if not isinstance(mask, Mask):
        return INVALID, NOT_KNOWN
    padded = type(mask) is Not and type(mask.mask) is prefix
    return (id(mask), mask.version()), UNLIMITED if padded else NOT_KNOWN


def replay(like: Signature, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Compute the output, if a call of this signature was stored; else return None."""
    call = _calls.get(like)
    if call is None:
        return None
    one_thread_after_fork()
    return _run(call, q, k, v)


def run_and_remember(
    of: Signature, passed: Inputs, mask: Mask | None, p: Problem, inputs: Inputs
) -> Tensor | None:
    """Compute the output of a checked call, and store the call.

    `passed` holds q, k and v as the caller passed them, `p` and `inputs` what the checks made of
    them. Returns None and computes nothing if the core would read copies, if the mask reads the
    positions of queries from a tensor, which decoding may change, or if gradients are batched.
    """
    if not is_plain() or any(isinstance(align, Tensor) for align in p.mask.aligns()):
        return None
    for x, y in zip(passed, inputs, strict=True):
        if (x is not y and x.data_ptr() != y.data_ptr()) or with_rows(y) is not y:
            return None
    decodes, by_id = of[0], type(of[2]) is tuple and type(of[2][0]) is int
    args = _for_any_length(p) if decodes else args_of(p)
    sizes = p.B, p.H, p.G, p.Tq, p.Tk, p.D, p.Dv, DTYPES[p.dtype]
    call = _Call(
        TENSORS.pack(*sizes, *6 * NO_TENSOR) + rule(args),
        (p.B, p.H, p.Tq, p.Dv)[4 - p.input_dims :],
        (args.lo, args.hi, args.bits, ref(mask, lambda _: _forget(of)) if by_id else None),
    )
    out = _run(call, *passed)
    if args.bits is None and (args.lo is None or args.lo.numel() <= MOST_REPEATED_RANGES):
        if len(_calls) >= MOST_REPEATED_CALLS:
            _calls.clear()
        _calls[of] = call
    return out


def _forget(like: Signature) -> None:
    """Delete the call of a mask that was deleted, because another mask may get its id."""
    _calls.pop(like, None)


def _for_any_length(p: Problem) -> KernelArgs:
    """Return `args_of` for a step of decoding with any number of keys; the core limits the ranges
    to its keys."""
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
