"""Find NaN and infinity in what another kernel computed, and compute it again, on the device.

torch's fused kernels multiply a masked value by a weight of 0. NaN or infinity in a masked key
reaches the result only as NaN. So a result of finite numbers is right, and any other raises a flag.
The Triton kernels then overwrite the result; while the flag is down, their programs return at once.
The host never reads the flag, so nothing waits for the device, and a CUDA graph can be captured.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...operators import KernelArgs
from ..replay import on_device
from .arguments import rows
from .launch_backward import gradients
from .launch_forward import Again, attend, head_block
from .start import start
from .tile import is_nonfinite, load_rows

CHECKED_ROWS = 64  # of a program of `raise_flag`


@triton.jit(do_not_specialize=["of_x", "of_y"])
def raise_flag(
    x, y, flag, x_heads, x_length, of_x, y_heads, y_length, of_y,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Set the flag to 1 if `x` or `y` has a number that is not finite.

    They have `of_x` and `of_y` rows of size D; `y` may be None.
    """
    program = tl.program_id(0)
    up = False
    if y is not None:
        of_first = (of_x + M - 1) // M
        if program >= of_first:
            up = has_nonfinite(y, program - of_first, y_heads, y_length, of_y, D, BLOCK_D, M)
        else:
            up = has_nonfinite(x, program, x_heads, x_length, of_x, D, BLOCK_D, M)
    else:
        up = has_nonfinite(x, program, x_heads, x_length, of_x, D, BLOCK_D, M)
    if up:
        tl.store(flag, 1)


@triton.jit
def has_nonfinite(
    x, tile, heads, length, count, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr
):
    """Return whether a tile of M rows has a number that is not finite."""
    at = tl.minimum(tile.to(tl.int64) * M + tl.arange(0, M), count - 1)
    numbers = load_rows(x, at // length // heads, at // length % heads, at % length, D, BLOCK_D)
    return is_nonfinite(numbers)


def repair_output(
    q: Tensor, k: Tensor, v: Tensor, rule: KernelArgs, out: Tensor, lse: Tensor | None
) -> Tensor:
    """Overwrite the output, and the log-sum-exp (B, H, Tq) if there is one, unless the output is
    finite. Return the flag, (1,)."""
    flag = out.new_zeros(1, dtype=torch.int32)
    _raise(flag, out)
    attend(q, k, v, rule, frozenset(), again=Again(flag, out, lse))
    return flag


def repair_gradients(
    dout: Tensor, out: Tensor, lse: Tensor, flag: Tensor, q: Tensor, k: Tensor, v: Tensor,
    rule: KernelArgs, grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Overwrite the gradients of q, k and v, unless all numbers are finite and the flag of the
    output is down. This raises the flag of the output if it overwrites.

    If a masked cell adds NaN to dV, its query has NaN in `dout`, and so in dQ. Therefore dV is not
    read.
    """
    dq, dk, _ = grads
    _raise(flag, dq, dk)
    again = Again(flag, *grads)
    gradients(dout, None, out, lse, None, None, q, k, v, rule, False, None, again)


def _raise(flag: Tensor, x: Tensor, y: Tensor | None = None) -> None:
    D = x.shape[-1]
    rows_of = [(rows(t), t.shape[1], t.shape[2], t.numel() // D) for t in (x, y) if t is not None]
    (x_rows, *of_x), (y_rows, *of_y) = rows_of if y is not None else (*rows_of, (None, 1, 1, 0))
    with on_device(x):
        start(
            raise_flag, sum(math.ceil(count / CHECKED_ROWS) for *_, count in rows_of),
            x.get_device(), x_rows, y_rows, flag, *of_x, *of_y,
            D=D, BLOCK_D=head_block(D), M=CHECKED_ROWS,
        )  # fmt: skip
