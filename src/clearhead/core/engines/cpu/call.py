"""Call the C++ core with tensors.

The core reads tensors and `KernelArgs` (kernels/fields.h). A mask is a band, key ranges of every
query, or key ranges and bits. Eager calls without gradients call the core directly. Autograd,
torch.compile, export, vmap and dispatch modes see the operator `clearhead::attend` (operator.py),
which calls `attend` here as well.
"""

import torch
from torch import Tensor

from ...errors import BadValue
from ...problem.dropout import draw_seed
from ...problem.problem import Inputs, Problem
from ...torch_state import is_plain
from ..operators import KernelArgs, kernel_args, with_rows
from .extension import core, must_have_fields

must_have_fields(KernelArgs)
DTYPES = {getattr(torch, name) for name in (core.dtypes() if core else ())}


# ------------------------------------------------------------------- from a problem to arguments


def args_of(p: Problem) -> KernelArgs:
    """Return the arguments of a problem besides q, k and v; dropout without a seed draws one."""
    seed: int | Tensor | None = None
    if p.dropout:
        seed = draw_seed() if p.seed is None else p.seed
    return kernel_args(p, seed)


def all_plain(p: Problem, inputs: Inputs) -> bool:
    """Return whether all tensors of the problem are plain (`is_plain`). Then the core can be called
    directly."""
    return is_plain(*inputs, p.sinks, None if p.bias is None else p.bias.numbers)


# ----------------------------------------------------------------------- from arguments to the core


def attend(
    q: Tensor, k: Tensor, v: Tensor, args: KernelArgs, lse: bool, rounding: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the output; with `lse` the log-sum-exp of every query in float64; with `rounding` the
    error of rounding the output to its dtype."""
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    B, H, Tq, _ = q.shape
    out = q.new_empty(B, H, Tq, v.shape[3])  # a tuple of sizes would take a microsecond longer
    sums = q.new_empty(B, H, Tq, dtype=torch.float64) if lse else None
    error = torch.empty_like(out) if rounding else None
    check(core.attend(q, k, v, out, sums, error, with_number(args)))
    return out, sums, error


def with_number(args: KernelArgs) -> KernelArgs:
    """Return the arguments with a seed that is a number, as the core reads it."""
    return args._replace(seed=int(args.seed)) if isinstance(args.seed, Tensor) else args


def check(code: int) -> None:
    """Raise an error if the core returned a code."""
    if code == 0:
        return
    if code == core.NO_DATA:
        rule = "the core reads numbers directly from memory."
        hint = "allocate its storage again (FSDP frees it outside a layer's call)."
        raise BadValue("A tensor has no memory.", rule, hint)
    raise RuntimeError(f"the C++ core refused a checked problem: {core.describe(code)}")
