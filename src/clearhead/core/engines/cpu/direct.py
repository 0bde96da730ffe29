"""Compute a plain call after quick checks: eager, on the CPU, without bias, sinks and dropout.

A small call spends most of its time in checks: `make_problem` and the choice of an engine take 15
us for 5 tokens of one head on a Zen 4, of which the core takes 0.4. The core reads q, k and v in C,
where their checks take 0.7 us. `make_problem` checks any other call, and raises the errors.
"""

import math
from typing import TypeAlias, cast

from torch import Tensor

from ...masks import Grid, Mask, everything
from ...problem.check import LARGEST_CAP
from ...problem.problem import Inputs, Problem
from ...stats import Result, Statistics
from ...stats.parse import must_fit
from ...torch_state import is_undisturbed, one_thread_after_fork
from ..operators import UNMASKED, KernelArgs, in_kernels, mask_args
from .call import check
from .extension import core, level
from .operator import RecordedCall
from .stats import core_results

# (B, H, G, Tq, Tk, D, Dv, dims, whether autograd records the call)
Sizes: TypeAlias = tuple[int, int, int, int, int, int, int, int, bool]


def output_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute the output of a plain call, or return None for any other call.

    Raises `BadValue` for a mask that does not fit.
    """
    if (checked := _check(q, k, v, mask, scale, softcap)) is None:
        return None
    (B, H, _, Tq, _, _, Dv, dims, grad), args = checked
    if grad:
        return RecordedCall.apply(q, k, v, args)
    # A tuple of sizes would take a microsecond longer.
    out = q.new_empty(B, H, Tq, Dv) if dims == 4 else q.new_empty((B, H, Tq, Dv)[4 - dims :])
    check(core.attend(q, k, v, out, None, None, args))
    return out


def answer_of(
    q: Tensor, k: Tensor, v: Tensor, statistics: Statistics, mask: Mask | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> tuple[Problem, Tensor, dict[str, Result]] | None:  # fmt: skip
    """Compute the output and statistics of a plain call without gradients, or return None for any
    other call. Raises as `output_of`, and `BadValue` for statistics that do not fit."""
    if (checked := _check(q, k, v, mask, scale, softcap)) is None:
        return None
    (B, H, G, Tq, Tk, D, Dv, dims, grad), args = checked
    if grad or not all(map(in_kernels, statistics)):
        return None
    p = Problem(
        B, H, G, Tq, Tk, D, Dv, q.dtype, q.device, everything if mask is None else mask, None,
        args.scale, softcap, None, 0.0, None, False, dims,
    )  # fmt: skip
    must_fit(statistics, p.grid)
    tensors = Inputs(q, k, v)  # the core reads fewer dimensions too
    out, results = core_results(p, tensors, args, statistics, True)
    return p, cast(Tensor, out), results


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, softcap: float | None
) -> tuple[Sizes, KernelArgs] | None:
    """Return the sizes and the arguments of a plain call, or None for any other call."""
    if core is None or not is_undisturbed() or not level():
        return None
    if scale is not None and not (type(scale) is float and math.isfinite(scale)):
        return None
    if softcap is not None and not (type(softcap) is float and 0 < softcap < LARGEST_CAP):
        return None
    if mask is not None and not isinstance(mask, Mask):
        return None
    if (sizes := core.sizes(q, k, v)) is None:
        return None
    one_thread_after_fork()
    seen = UNMASKED
    if mask is not None:
        B, H, _, Tq, Tk, *_ = sizes
        grid = Grid(Tq, Tk, B, H)
        mask.check(grid)
        mask.must_fit(grid)
        seen = mask_args(mask, grid, lambda: mask.key_ranges(grid, q.device))
    if scale is None:
        scale = 1.0 / math.sqrt(sizes[5] or 1)
    return sizes, KernelArgs(scale, softcap or 0.0, *seen)
