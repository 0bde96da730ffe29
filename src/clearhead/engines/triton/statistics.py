"""Statistics by the Triton kernels: those of rows in the forward sweep, sums of weights in a second
one. They come back as what `stats/state.py` describes, on the device, and finish and merge like any
other `Partial`."""

import math
from dataclasses import replace
from functools import reduce

import torch
import triton
from torch import Tensor

from ...masks.key_ranges import KeyRanges
from ...problem.online_softmax import anchor
from ...problem.problem import Inputs, Problem
from ...stats import Statistic
from ...stats.buffers import Buffers
from ...stats.partial import Partial
from ...stats.state import RowStats, WeightSums, finish_rows, largest, merge_rows
from ...stats.statistics import bin_of
from ...torch_state import is_plain
from .arguments import cells, cells_if, kernel_rule, rows, rule_of, sizes_of, with_rows
from .forward import Groups
from .gradients import seen_from
from .launch import FUSED, attend, dot_precision, head_block, on_device
from .operator import answer
from .weight_sums import exact_rows, sum_weights

LN2 = math.log(2.0)
MOST_TOP = 64  # largest weights of a row that are kept in registers


def can_count(p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> bool:
    """Can the kernels count these? Not with gradients, and not under a tracer or transform."""
    buffers = Buffers(p, statistics)
    plain = is_plain(*inputs, p.sinks, None if p.bias is None else p.bias.numbers)
    no_bits = all(group.bits is None for group in buffers.groups)
    return plain and not p.records_grad and no_bits and buffers.best <= MOST_TOP


def answer_and_lse(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]
) -> tuple[Tensor, Partial]:
    """The output and the log-sum-exp alone, which the operator returns and differentiates. The
    logits of a query, and its sink, then count as one logit, the log-sum-exp itself."""
    out, lse = answer(p, inputs, True)
    assert lse is not None
    top = lse.detach()
    found = RowStats(top, torch.exp(lse - anchor(top)))
    return out, Partial(replace(p, sinks=None), statistics, *_everything(p), found, None)


def answer_and_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], with_out: bool
) -> tuple[Tensor | None, Partial]:
    """The statistics of all queries on all keys, and with `with_out` the output of the same sweep;
    without it the values are not read."""
    buffers = Buffers(p, statistics)
    rule = rule_of(p)
    wanted = {"max", "sum"}
    wanted |= {"moment"} if buffers.moment else set()
    wanted |= {"masses"} if buffers.groups else set()
    wanted |= {"best", "where"} if buffers.best else set()
    out, found, splits = attend(
        inputs.q, inputs.k, inputs.v if with_out else None, rule, frozenset(wanted),
        _stacked(buffers.groups) if buffers.groups else None, len(buffers.groups), buffers.best,
    )  # fmt: skip
    natural = kernel_rule(rule, sizes_of(inputs.q, inputs.k)).natural
    parts = [
        _row_stats({n: x[i] for n, x in found.items()}, natural, buffers) for i in range(splits)
    ]
    row_stats = reduce(merge_rows, parts)
    p = p.undropped
    sums = None
    if buffers.weights:
        # In units of the rule, as the kernel compares.
        top, share = found["max"].amax(0), finish_rows(row_stats, p.sinks).share
        sums = _sum_weights(p, inputs, buffers, top, share)
    return out, Partial(p, statistics, *_everything(p), row_stats, sums)


def _row_stats(found: dict[str, Tensor], natural: float, buffers: Buffers) -> RowStats:
    best = where = None
    if buffers.best:
        best, where = largest(found["best"], found["where"].long(), buffers.best)
        best = best * natural
    return RowStats(
        found["max"] * natural,
        found["sum"],
        found["moment"] * LN2 if buffers.moment else None,
        found["masses"][..., : len(buffers.groups)] if buffers.groups else None,
        best,
        where,
    )


def _stacked(groups: list[KeyRanges]) -> Groups:
    """The ranges of all groups side by side, as many for each; the added ones are empty."""
    most = max(g.lo.shape[-1] for g in groups)
    count = triton.next_power_of_2(len(groups))
    shape = torch.broadcast_shapes(*(g.lo.shape[:3] for g in groups))
    device = groups[0].lo.device
    lo = torch.zeros(*shape, count, most, dtype=torch.int32, device=device)
    hi = torch.zeros_like(lo)
    for i, group in enumerate(groups):
        n = group.lo.shape[-1]
        lo[..., i, :n], hi[..., i, :n] = group.lo, group.hi
    return Groups(cells(lo.flatten(3)), cells(hi.flatten(3)), most)


def _sum_weights(
    p: Problem, inputs: Inputs, buffers: Buffers, top: Tensor, share: Tensor
) -> WeightSums:
    q, k = with_rows(inputs.q), with_rows(inputs.k)
    rule, sizes = rule_of(p), sizes_of(q, k)
    sums = buffers.no_sums(p.Tk)
    if not top.numel() or not p.Tk:
        return sums
    block_d = head_block(p.D)
    q_bins, k_bins = buffers.bins or (1, 1)
    M, N = _tile(p, block_d, q_bins)
    tiles = math.ceil(p.Tk / N)
    first, last = (None, None) if rule.lo is None else seen_from(rule, sizes, M, N)
    how = dict(
        D=p.D,
        BLOCK_D=block_d,
        M=M,
        N=N,
        BAND=rule.lo is None,
        PRECISION=dot_precision(p.dtype),
        **FUSED,
    )
    of_kernel = kernel_rule(rule, sizes)
    share = share.contiguous()
    with on_device(q):
        if sums.received is not None or sums.map is not None:
            # N keys touch at most so many bins of at least Tk // k_bins keys.
            slots = -(-(N - 1) // (p.Tk // k_bins)) + 1
            pooled = None
            if sums.map is not None:
                pooled = q.new_empty((p.B, p.H, q_bins, tiles, slots), dtype=torch.float32)
            sum_weights[(tiles * p.H * p.B,)](
                rows(q), rows(k), top, share, sums.received, pooled, cells_if(first), cells_if(last),
                of_kernel, sizes, tiles, q_bins, k_bins, slots, **how,
            )  # fmt: skip
            if pooled is not None:
                sums = sums._replace(map=_map(pooled, p.Tk, k_bins, N))
        if buffers.exact:
            places = torch.tensor(buffers.exact, dtype=torch.int32).to(p.device)
            count = len(buffers.exact)
            exact_rows[(tiles * math.ceil(count / M) * p.H * p.B,)](
                rows(q), rows(k), top, share, places, sums.rows, of_kernel, sizes, tiles, count,
                **how,
            )  # fmt: skip
    return sums


def _tile(p: Problem, block_d: int, q_bins: int) -> tuple[int, int]:
    """Queries and keys of a tile; no more queries than a bin has, which would be idle."""
    wide = p.dtype == torch.float32 or block_d > 128
    rows_of_bin = triton.next_power_of_2(max(p.Tq // q_bins, 1))
    return min(32 if wide else 64, max(16, rows_of_bin)), 32 if wide else 64


def _map(pooled: Tensor, Tk: int, k_bins: int, N: int) -> Tensor:
    """Bins of keys from what the tiles of N keys found, (B, H, q_bins, tiles, slots): each bin adds
    up, in order, the slots that hold a part of it. A gather, so that NaN stays in its bin."""
    tiles, slots = pooled.shape[-2:]
    device = pooled.device
    column = torch.arange(k_bins, device=device)
    start, stop = column * Tk // k_bins, (column + 1) * Tk // k_bins
    widest = int(-(-Tk // k_bins) // N) + 2
    tile = (start // N).unsqueeze(-1) + torch.arange(widest, device=device)
    slot = column.unsqueeze(-1) - bin_of(tile * N, Tk, k_bins)
    inside = tile * N < stop.unsqueeze(-1)
    place = (tile.clamp(max=tiles - 1) * slots + slot.clamp(0, slots - 1)).flatten()
    parts = pooled.flatten(3)[..., place].unflatten(-1, (k_bins, widest))
    return parts.masked_fill(~inside, 0.0).sum(-1)


def _everything(p: Problem) -> tuple[Tensor, Tensor]:
    """The queries and keys that a partial of the kernels covers: all."""
    return torch.arange(p.Tq, device=p.device), torch.arange(p.Tk, device=p.device)
