"""Pack a problem into a struct, and call the C++ core with it.

The core reads one struct (kernels/attention.h, `Problem`): addresses, strides, sizes, and the mask.
A mask is a band, key ranges of every query, or key ranges and bits. Eager calls without gradients
call the core directly. Autograd, torch.compile, export, vmap and dispatch modes see the operator
`clearhead::attend` (operator.py), which calls `attend` here as well.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ...errors import BadValue
from ...problem.dropout import draw_seed
from ...problem.problem import Inputs, Problem
from ...torch_state import is_plain
from ..operators import KernelArgs, kernel_args, with_rows
from .extension import core, layout

# A problem is packed in two parts: the tensors, and the rest, which many calls have in common.
TENSORS, RULE = layout(
    "Problem",
    "B H G Tq Tk D Dv dtype q k v out lse rounding",
    "scale softcap mask bias bias_dtype slopes slopes_shift sinks dropout seed row_stats",
)
layout("Mask", "before after ranges lo hi bits")  # checked, for `mask_numbers`
DTYPES = {getattr(torch, name): i for i, name in enumerate(core.dtypes() if core else ())}
NO_TENSOR, NO_MATRIX = (0,) * 4, (0,) * 5


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
    check(core.attend(pack(q, k, v, out, sums, args, error)))
    return out, sums, error


def pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    args: KernelArgs,
    rounding: Tensor | None = None,
) -> bytes:
    """Pack the core's `Problem`. q, k and v come from `with_rows`. Tensors must outlive the
    bytes."""
    B, H, Tq, D = q.shape
    tensors = TENSORS.pack(
        B, H, k.shape[1], Tq, k.shape[2], D, v.shape[3], DTYPES[q.dtype],
        *tensor_view(q), *tensor_view(k), *tensor_view(v),
        *tensor_view(out), *tensor_view(lse), *tensor_view(rounding),
    )  # fmt: skip
    return tensors + rule(args)


def rule(args: KernelArgs) -> bytes:
    """Pack the second part of the core's `Problem`, which has no inputs and outputs."""
    if args.lo is args.bias is args.slopes is args.sinks is None and not args.dropout:
        return _numbers(*args[:4])
    return _rule(args)


@lru_cache(maxsize=64)
def _numbers(scale: float, softcap: float, before: int, after: int) -> bytes:
    """Pack a rule without tensors. It is cached, because many calls have the same numbers."""
    return _rule(KernelArgs(scale, softcap, before, after))


def _rule(args: KernelArgs) -> bytes:
    scale, softcap, before, after, lo, hi, bits, bias, slopes, shift, sinks, dropout, seed = args
    return RULE.pack(
        scale, softcap, *mask_numbers(before, after, lo, hi, bits),
        *matrix_view(bias), 0 if bias is None else DTYPES[bias.dtype],
        *_per_head(slopes), shift, *_per_head(sinks), dropout, 0 if seed is None else int(seed), 0,
    )  # fmt: skip


def mask_numbers(
    before: int, after: int, lo: Tensor | None, hi: Tensor | None, bits: Tensor | None
) -> tuple[int, ...]:
    """Return the members of the core's `Mask`."""
    ranges = 0 if lo is None else lo.shape[-1]
    return before, after, ranges, *matrix_view(lo), *matrix_view(hi), *matrix_view(bits)


def check(code: int) -> None:
    """Raise `RuntimeError` if the core returned an error code."""
    if code:
        raise RuntimeError(f"the C++ core refused a checked problem: {core.describe(code)}")


def tensor_view(x: Tensor | None) -> tuple[int, int, int, int]:
    """Return the members of the core's `TensorView`: address and strides over (b, h, t)."""
    if x is None:
        return NO_TENSOR
    b, h, t = x.stride()[:3]
    return x.data_ptr() or _no_address(x), b, h, t


def matrix_view(x: Tensor | None) -> tuple[int, ...]:
    """Return the members of the core's `MatrixView`: address and strides over (b, h, q, x); the
    stride is 0 where a dimension of size 1 broadcasts."""
    if x is None:
        return NO_MATRIX
    (b, h, q, last), (B, H, Tq, N) = x.stride(), x.shape
    address = x.data_ptr() or _no_address(x)
    return address, b * (B != 1), h * (H != 1), q * (Tq != 1), last * (N != 1)


def _per_head(x: Tensor | None) -> tuple[int, ...]:
    return NO_MATRIX if x is None else (x.data_ptr() or _no_address(x), 0, x.stride(0), 0, 0)


def _no_address(x: Tensor) -> int:
    """Return the null address of an empty tensor. Raises `BadValue` if a tensor's memory was
    freed."""
    if x.numel():
        raise BadValue(
            f"A tensor of shape {tuple(x.shape)} has no memory.",
            "the core reads numbers directly from memory.",
            "allocate its storage again (FSDP frees it outside a layer's call).",
        )
    return 0
