"""The C++ core: exact attention on a CPU, forward, as `clearhead._kernels` computes it.

A question becomes one packed struct (kernels/attention.h, `Problem`): addresses, strides, sizes,
and the mask as a diagonal, as runs of keys per query, or as runs and bits. Eager calls go straight
to the core; under a tracer (torch.compile, export, a dispatch mode) the same work is the operator
`clearhead::attend`.
"""

import os
import struct
from typing import Any

import torch
from torch import Tensor

from ..biases import Alibi, TensorBias
from ..errors import BadValue
from ..masks import And, Causal, Everything, Mask, window
from ..problem import Inputs, Problem
from .engine import Answer, Engine

try:
    from .. import _kernels as core
except ModuleNotFoundError as error:  # a broken core is an error; a missing one is a fact
    if error.name not in ("clearhead._kernels", "nanobind_backend"):
        raise
    core = None  # type: ignore[assignment]

# Known to Python as well, so that a tracer need not look into the core.
_level: str = core.level() if core else ""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
EVERY_KEY = 2**60

# The layout of `Problem`: sizes and dtype; q, k, v, out, lse as (address, b, h, t); scale and
# softcap; the diagonal and the number of runs; lo, hi, bits and bias as (address, b, h, q, x);
# the bias's dtype; slopes and their shift; sinks; the most threads.
LAYOUT = struct.Struct("<8q" + 5 * "4q" + "2d" + "4q" + 4 * "5q" + "q" + "5q" + "q" + "5q" + "q")
NO_PLACE, NO_GRID = (0,) * 4, (0,) * 5


class Cpu(Engine):
    name = "cpu"
    skips_tiles = True

    @property
    def caption(self) -> str:  # type: ignore[override]
        return f"the C++ core, {status()}"

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        if core is None:
            return ["clearhead is installed without its C++ kernels"]
        reasons = []
        if not _level:
            reasons.append(_false_level())
        if p.device.type not in ("cpu", "meta"):
            reasons.append(f"the C++ core computes on the CPU, not on {p.device}")
        if p.dtype not in DTYPES:
            reasons.append(f"the C++ core computes no {str(p.dtype).removeprefix('torch.')}")
        if p.grad:
            reasons.append("the C++ core has no backward yet")
        if p.dropout:
            reasons.append("the C++ core has no dropout yet")
        if isinstance(p.bias, Alibi) and _corner(p.bias.align, p) is None:
            reasons.append("the C++ core knows no ALiBi with a position per batch")
        elif p.bias is not None and not isinstance(p.bias, (Alibi, TensorBias)):
            reasons.append(f"the C++ core does not know {p.bias!r}")
        return reasons

    def run(self, problem: Problem, inputs: Inputs) -> Answer:
        return Answer(_answer(problem, inputs, False)[0])

    def run_with_lse(self, problem: Problem, inputs: Inputs) -> Answer:
        """The same output, bit for bit, and the log-sum-exp of every query."""
        return Answer(*_answer(problem, inputs, True))


def status() -> str:
    """What the core is here: its instruction set and threads, or why there is none."""
    if core is None:
        return (
            "missing: installed without a C++ compiler; torch's own kernel answers, 2 to 30x slower"
        )
    if not _level:
        return _false_level()
    what = {n: text for n, text, _ in core.levels()}[_level]
    return f"{_level} ({what})"


def use_level(name: str = "") -> str:
    """Force an instruction-set level by name, or the widest for an empty one; returns the old one.

    The environment variable CLEARHEAD_CPU does the same when clearhead is imported.
    """
    global _level
    before = _level
    if not core.choose_level(name):
        present = ", ".join(repr(n) for n, _, here in core.levels() if here)
        raise BadValue(
            f"The instruction-set level is {name!r}.",
            f"this machine and this build have {present}.",
            "pass one of these, or none for the widest.",
        )
    _level = core.level()
    return before


def _false_level() -> str:
    present = ", ".join(n for n, _, here in core.levels() if here)
    return f"CLEARHEAD_CPU={os.environ.get('CLEARHEAD_CPU')} is none of this machine's: {present}"


# ------------------------------------------------------------------- from a problem to arguments


def _answer(p: Problem, inputs: Inputs, lse: bool) -> tuple[Tensor, Tensor | None]:
    q, k, v = inputs
    diagonal = None if isinstance(p.mask, Everything) else _diagonal(p.mask, p)
    lo = hi = bits = bias = slopes = sinks = None
    shift = 0
    if diagonal is None and p.masked:
        reach = p.reach
        lo, hi, bits = reach.lo, reach.hi, reach.bits
    if isinstance(p.bias, TensorBias):
        bias = p.bias.four()
        bias = bias if bias.dtype in DTYPES else bias.float()
    elif isinstance(p.bias, Alibi):
        slopes = p.bias.of(p.grid).to("cpu", torch.float32)
        shift = _corner(p.bias.align, p) or 0
    if p.sinks is not None:
        sinks = p.sinks.float()
    ask = _attend if _plain(q) else torch.ops.clearhead.attend
    before, after = diagonal or (EVERY_KEY, EVERY_KEY)
    return ask(
        q, k, v, p.scale, p.softcap or 0.0, before, after, lo, hi, bits, bias, slopes, shift,
        sinks, lse,
    )  # fmt: skip


def _plain(x: Tensor) -> bool:
    """Is this a tensor with memory behind it, and nobody watching what happens to it?"""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and type(x) in (Tensor, torch.nn.Parameter)
    )


def _corner(align: object, p: Problem) -> int | None:
    """Where query 0 stands among the keys; None if that differs from batch to batch."""
    if align is None or align == "start":
        return 0
    if align == "end":
        return p.Tk - p.Tq
    return align if isinstance(align, int) else None


def _diagonal(mask: Mask, p: Problem) -> tuple[int, int] | None:
    """(before, after) if every query q sees the keys q - before to q + after, else None.

    Such a mask needs no tensors at all, which is most of the cost of a small call.
    """
    if isinstance(mask, Everything):
        return EVERY_KEY, EVERY_KEY
    if isinstance(mask, And):
        left, right = _diagonal(mask.left, p), _diagonal(mask.right, p)
        if left is None or right is None:
            return None
        return min(left[0], right[0]), min(left[1], right[1])
    if not isinstance(mask, (Causal, window)) or isinstance(mask.align, Tensor):
        return None
    corner = _corner(mask.align, p)
    if corner is None:
        return None
    if isinstance(mask, Causal):
        return EVERY_KEY, corner
    before = EVERY_KEY if mask.before is None else mask.before - corner
    after = EVERY_KEY if mask.after is None else mask.after + corner
    return before, after


# ----------------------------------------------------------------------- from arguments to the core


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, before: int, after: int,
    lo: Tensor | None, hi: Tensor | None, bits: Tensor | None, bias: Tensor | None,
    slopes: Tensor | None, shift: int, sinks: Tensor | None, lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    (q, q_place), (k, k_place), (v, v_place) = _rows(q), _rows(k), _rows(v)
    B, H, Tq, D = q.shape
    G, Tk, Dv = k.shape[1], k.shape[2], v.shape[3]
    out = torch.empty((B, H, Tq, Dv), dtype=q.dtype)
    sums = torch.empty((B, H, Tq), dtype=torch.float32) if lse else None
    code = core.attend(
        LAYOUT.pack(
            B, H, G, Tq, Tk, D, Dv, DTYPES[q.dtype],
            *q_place, *k_place, *v_place, *_place(out),
            *(NO_PLACE if sums is None else _place(sums)),
            scale, softcap,
            lo is None, before, after, 0 if lo is None else lo.shape[-1],
            *_grid(lo), *_grid(hi), *_grid(bits), *_grid(bias),
            0 if bias is None else DTYPES[bias.dtype],
            *_heads(slopes), shift, *_heads(sinks), 0,
        )
    )  # fmt: skip
    if code:
        raise RuntimeError(
            f"the C++ core refused a question that was checked: {core.complaint(code)}"
        )
    return out, sums


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """The same numbers with a contiguous last dimension (any other strides may stay), and where
    they lie."""
    b, h, t, last = x.stride()
    if last != 1 and x.shape[3] > 1:
        x = x.contiguous()
        b, h, t, _ = x.stride()
    return x, (x.data_ptr(), b, h, t)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    b, h, t = x.stride()[:3]
    return x.data_ptr(), b, h, t


def _grid(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides over (b, h, q, x); a dimension of size 1 stands for all."""
    if x is None:
        return NO_GRID
    steps = zip(x.stride(), x.shape, strict=True)
    return x.data_ptr(), *(0 if size == 1 else step for step, size in steps)


def _heads(x: Tensor | None) -> tuple[int, ...]:
    return NO_GRID if x is None else (x.data_ptr(), 0, x.stride(0), 0, 0)


# The operator, for whoever traces instead of running. `Library` must outlive its definitions.
_library = torch.library.Library("clearhead", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, float scale, float softcap, int before, int after, "
    "Tensor? lo, Tensor? hi, Tensor? bits, Tensor? bias, Tensor? slopes, int shift, "
    "Tensor? sinks, bool lse) -> (Tensor, Tensor)"
)


def _operate(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, sums = _attend(*arguments)
    return out, torch.empty(0) if sums is None else sums


_library.impl("attend", _operate, "CPU")


@torch.library.register_fake("clearhead::attend", lib=_library)
def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, H, Tq, _ = q.shape
    shape = (B, H, Tq) if rest[-1] else (0,)
    return q.new_empty((B, H, Tq, v.shape[3])), q.new_empty(shape, dtype=torch.float32)
