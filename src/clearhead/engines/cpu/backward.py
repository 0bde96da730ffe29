"""The way back by the core (kernels/generic/backward.h): from what came back to the gradients."""

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .extension import core
from .pack import NO_GRID, Asked, check, grid, pack, place, rows_of

# `Gradient` in kernels/attention.h.
GRADIENT = struct.Struct("=" + 6 * "4q" + "2q" + 2 * "4q" + "5q")

# Heads are the tasks of the way back. Fewer than this are cut into stretches of keys, of at least
# so many; each stretch then has its own dq, and they are added in their order. The batch has no
# say, so an example learns the same bits in any company.
TASKS, LEAST_STRETCH = 16, 1024


class CameBack(NamedTuple):
    """What `Gradient` in kernels/attention.h says came back; None is what was not used."""

    dlse: Tensor | None = None
    dlog: Tensor | None = None
    dreceived: Tensor | None = None
    dout: Tensor | None = None
    out: Tensor | None = None
    rounding: Tensor | None = None


def gradients(
    q: Tensor, k: Tensor, v: Tensor, asked: Asked, lse: Tensor, came: CameBack, learn_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sinks; empty for a bias not wanted or sinks not there."""
    bias, sinks = asked.bias if learn_bias else None, asked.sinks
    q, k, v = (rows_of(x) for x in (q, k, v))
    (B, H, Tq, D), (_, G, Tk, Dv) = q.shape, v.shape

    def zeros(*shape: int) -> Tensor:
        return q.new_zeros(shape, dtype=torch.float32)

    parts = min(math.ceil(TASKS / max(H, 1)), max(Tk // LEAST_STRETCH, 1))
    dbias = zeros(0)
    if bias is not None:
        # A bias that is the same for all queries or keys is added up per head first: O(T) numbers.
        matrix = bias.shape[2] > 1 and bias.shape[3] > 1
        dbias = zeros(*(bias.shape if matrix else (B, H, *bias.shape[2:])))
        parts = 1 if bias.shape[3] == 1 else parts
    delta = zeros(B, H, Tq)
    dq = q.new_zeros((parts, B, H, Tq, D), dtype=q.dtype if parts == 1 else torch.float32)
    dk, dv = zeros(B, H, Tk, D), zeros(B, H, Tk, Dv)
    check(
        core.backward(
            pack(q, k, v, came.out, lse, asked, came.rounding),
            GRADIENT.pack(
                *place(came.dout), *place(came.dlse), *place(came.dlog), *place(came.dreceived),
                *place(delta), *place(dq[0]), parts, dq.stride(0), *place(dk), *place(dv),
                *(NO_GRID if bias is None else grid(dbias)),
            ),
        )
    )  # fmt: skip
    if bias is not None:
        for dim in (0, 1):
            dbias = _sum(dbias, dim, bias.shape[dim])
        dbias = dbias.to(bias.dtype)
    dsinks = zeros(0)
    if sinks is not None:
        taken = torch.exp((sinks.view(-1, 1) - lse) / log_unit(lse)).float() * delta
        dsinks = -_over_queries(_sum(taken.masked_fill(lse == -math.inf, 0.0), 0, 1).squeeze(0))
    return (
        _sum(dq, 0, 1).squeeze(0).to(q.dtype),
        _sum(dk.view(B, G, H // max(G, 1), Tk, D), 2, 1).squeeze(2).to(q.dtype),
        _sum(dv.view(B, G, H // max(G, 1), Tk, Dv), 2, 1).squeeze(2).to(q.dtype),
        dbias,
        dsinks,
    )


def _sum(x: Tensor, dim: int, size: int) -> Tensor:
    """The sum over a dimension that is to have this size, one slice after the other, so that it has
    the same bits however many threads torch has."""
    if x.shape[dim] == size:
        return x
    total = torch.zeros_like(x.narrow(dim, 0, 0).sum(dim, keepdim=True))
    for i in range(x.shape[dim]):
        total += x.narrow(dim, i, 1)
    return total


def log_unit(lse: Tensor) -> Tensor:
    """What the logarithm of the sum is counted in (kernels/generic/functions.h, `log_unit`)."""
    power = torch.frexp(lse.nan_to_num(0.0, 0.0, 0.0)).exponent - 33
    return torch.ldexp(torch.ones_like(lse), power.clamp(min=0))


def _over_queries(x: Tensor) -> Tensor:
    """(H, Tq) -> (H,): the sum in halves, likewise always in one order."""
    while x.shape[-1] > 1:
        x = pad(x, (0, x.shape[-1] % 2))
        x = x[:, ::2] + x[:, 1::2]
    return x.sum(-1)
