"""Launch the backward kernels: choose tiles, find which queries see them, and allocate buffers."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....torch_state import has_values
from ...operators import KernelArgs, with_rows
from ..replay import do_not_record, on_device
from .arguments import KernelRule, Rows, Sizes, cells_if, kernel_rule, rows, sizes_of
from .backward import bias_gradients, key_gradients, query_gradients, row_products
from .launch_forward import (
    Again,
    Table,
    Tiles,
    dot_precision,
    head_block,
    hides_keys,
    tile_from,
    transposes_tiles,
)
from .start import start

# Tiles as in `FORWARD` (launch_forward.py). A program of `query_gradients` and `bias_gradients`
# holds its queries and walks over keys. A program of `key_gradients` holds its keys, and two
# (keys, D) sums in float32.
QUERY_GRADIENTS: Table = {
    False: {
        64: ((128, 64, 8, 3), (128, 64, 8, 2)),
        128: ((128, 64, 8, 3), (128, 32, 8, 2)),
        256: ((64, 32, 8, 2), (32, 32, 4, 2)),
    },
    True: {
        64: ((32, 32, 4, 2), (32, 32, 4, 2)),
        128: ((16, 32, 4, 2), (16, 32, 4, 2)),
        256: ((16, 16, 4, 2), (16, 16, 4, 2)),
    },
}
KEY_GRADIENTS: Table = {
    False: {
        64: ((64, 64, 4, 2), (64, 64, 4, 2)),
        128: ((64, 64, 8, 2), (32, 64, 8, 2)),
        256: ((32, 32, 8, 2), (32, 32, 8, 1)),
    },
    True: {
        64: ((32, 32, 8, 2), (32, 32, 8, 2)),
        128: ((16, 32, 8, 2), (16, 32, 8, 2)),
        256: ((16, 16, 8, 2), (16, 16, 8, 1)),
    },
}

# The same for transposed tiles (`transposes_tiles`).
TRANSPOSED_KEY_GRADIENTS: Table = {
    False: {
        64: ((64, 64, 4, 2), (64, 128, 8, 3)),
        128: ((32, 64, 4, 2), (32, 128, 8, 3)),
        256: KEY_GRADIENTS[False][256],
    },
    True: KEY_GRADIENTS[True],
}

# Heads that read the same keys are split among programs until `key_gradients` has `LEAST_PROGRAMS`
# for an example, since a large GPU has 132 to 148 processors. A split writes dK and dV once more,
# in float32. With `LEAST_OF_SPLIT` queries over all its heads, that takes an eighth of the time of
# its products, by the rates of an H100. Splits do not depend on the batch
# (launch_forward.py).
LEAST_PROGRAMS, LEAST_OF_SPLIT = 256, 2048


def gradients(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    top: Tensor | None,
    share: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: KernelArgs,
    bias_grad: bool,
    again: Again | None = None,
    seen: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, bias and sinks. The one of the bias is empty without
    `bias_grad`, the one of the sinks without sinks.

    If `top` and `share` are None, the weights follow from `lse` alone. With `again`, the kernels
    compute carefully, and write the rows of its tensors that are not finite, in one split, if its
    flag is up (`attend`). `seen` is the result of `seen_from`, if it is known.
    """
    q, k, v, dout, out = (with_rows(x) for x in (q, k, v, dout, out))
    sizes = sizes_of(q, k)
    B, H, G, Tq, Tk = sizes
    D, DV = q.shape[3], v.shape[3]
    if again is None:
        new = torch.empty if Tk else torch.zeros  # without keys the kernels do not start
        dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    else:
        dq, dk, dv = cast("tuple[Tensor, Tensor, Tensor]", again[1:])
    bias = rule.bias if bias_grad else None
    dbias, dsinks = q.new_zeros(0, dtype=torch.float32), q.new_zeros(0, dtype=torch.float32)
    if bias is not None:
        dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=q.device)
    if rule.sinks is not None:
        dsinks = torch.zeros_like(rule.sinks)
    if not B * H * Tq:
        return dq, dk.zero_(), dv.zero_(), dbias, dsinks

    delta = q.new_empty((B, H, Tq), dtype=torch.float32)
    of_kernel = kernel_rule(rule)
    flag = None if again is None else again.flag
    if again is not None:
        of_kernel = of_kernel._replace(careful=1)
    elif hides_keys(rule, sizes):
        flag = q.new_zeros(1, dtype=torch.int32)
    block = max(head_block(D), head_block(DV))
    precision = dot_precision(q.dtype)
    for_all: dict[str, Any] = dict(
        D=D, DV=DV, BLOCK_D=head_block(D), BLOCK_DV=head_block(DV), BAND=rule.lo is None,
        DROPS=rule.seed is not None, PRECISION=precision,
    )  # fmt: skip
    all_lse = None
    if top is None or share is None:
        all_lse, top, share = lse.contiguous(), torch.empty_like(delta), torch.empty_like(delta)
    saved = top.contiguous(), share.contiguous(), delta
    with on_device(q):
        start(
            row_products, math.ceil(B * H * Tq / 32), q.get_device(),
            rows(dout), rows(out), None if dlse is None else dlse.float().contiguous(), all_lse,
            *saved, None if again is None else flag, of_kernel.natural, H, Tq, B * H * Tq,
            DV=DV, BLOCK_DV=head_block(DV), M=32,
        )  # fmt: skip
        if Tk:
            tensors = rows(q), rows(k), rows(v), rows(dout)
            tile = _tile(QUERY_GRADIENTS, q, block, rule)
            tiles = math.ceil(Tq / tile.queries)
            start(
                query_gradients, tiles * H * B, q.get_device(),
                *tensors, *saved, rows(dq), flag, rule.scale, of_kernel, sizes, tiles,
                **_launched(tile), **for_all,
            )  # fmt: skip
            if bias is not None and bias.numel():
                dbias = _of_bias(bias, tensors, saved, of_kernel, sizes, tile, for_all)
            transposed = transposes_tiles(q.device)
            tile = _tile(TRANSPOSED_KEY_GRADIENTS if transposed else KEY_GRADIENTS, q, block, rule)
            if rule.lo is not None and seen is None:
                seen = seen_from(rule, sizes, tile.queries, tile.keys)
            first, last = seen or (None, None)
            tiles = math.ceil(Tk / tile.keys)
            splits, chunk = splits_of_heads(H // G, tiles * G, Tq) if again is None else (1, H // G)
            parts = [dk, dv]
            if splits > 1:
                parts = [x.new_empty((splits, *x.shape), dtype=torch.float32) for x in parts]
            start(
                key_gradients, tiles * splits * G * B, q.get_device(),
                *tensors, *saved, *(rows(x.flatten(0, -4)) for x in parts), flag, cells_if(first),
                cells_if(last), rule.scale, of_kernel, sizes, tiles, splits, chunk,
                TRANSPOSED=transposed, **_launched(tile), **for_all,
            )  # fmt: skip
            if splits > 1:
                dk, dv = (x.sum(0).to(q.dtype) for x in parts)
    if again is None and flag is not None and Tk:
        gradients(
            dout, dlse, out, lse, top, share, q, k, v, rule, False, Again(flag, dq, dk, dv), seen
        )  # fmt: skip
    if rule.sinks is not None:
        share_of_sink = torch.exp(rule.sinks.view(-1, 1) - lse)
        share_of_sink = share_of_sink.masked_fill(lse == -math.inf, 0.0)
        dsinks = -(share_of_sink * delta).sum((0, 2))
    return dq, dk, dv, dbias, dsinks


def splits_of_heads(group_size: int, programs: int, Tq: int) -> tuple[int, int]:
    """Return the number of splits of the heads that read the same keys, and the heads of each
    split, for an example that has `programs` programs without splits. The results of splits are
    added in the order of the heads."""
    chunk = max(group_size * programs // LEAST_PROGRAMS, math.ceil(LEAST_OF_SPLIT / Tq))
    chunk = min(chunk, group_size)
    return math.ceil(group_size / chunk), chunk


def _tile(table: Table, q: Tensor, block: int, rule: KernelArgs) -> Tiles:
    tile = tile_from(table, q.shape[2], block, q.dtype, q.device)
    if rule.bias is not None:  # each stage holds a tile of the bias
        tile = tile._replace(stages=min(tile.stages, 2))
        if tile.keys > 64:
            tile = tile._replace(queries=min(tile.queries, 32))
    return tile


def _launched(tile: Tiles) -> dict[str, int]:
    """Return the keywords of a backward kernel for this tile."""
    return dict(M=tile.queries, N=tile.keys, warps=tile.warps, stages=tile.stages)


def _of_bias(
    bias: Tensor,
    tensors: tuple[Rows, ...],
    saved: tuple[Tensor, ...],
    rule: KernelRule,
    sizes: Sizes,
    tile: Tiles,
    for_all: dict[str, Any],
) -> Tensor:
    """Compute the gradient of a bias, in its shape and dtype."""
    q_tiles, k_tiles = math.ceil(sizes.Tq / tile.queries), math.ceil(sizes.Tk / tile.keys)
    B, H, Tq, Tk = bias.shape
    if Tq == 1 or Tk == 1:  # O(T) numbers for each head, summed afterwards
        B, H = sizes.B, sizes.H
    per_q, per_k = Tq > 1, Tk > 1
    dbias = torch.zeros(B, H, Tq, Tk, dtype=torch.float32, device=bias.device)
    programs = B * H * (q_tiles if per_q else 1) * (k_tiles if per_k else 1)
    start(
        bias_gradients, programs, dbias.get_device(),
        *tensors, *saved, dbias, rule, sizes, q_tiles, k_tiles,
        PER_B=B > 1, PER_H=H > 1, PER_Q=per_q, PER_K=per_k, **_launched(tile), **for_all,
    )  # fmt: skip
    broadcast = [d for d in (0, 1) if dbias.shape[d] != bias.shape[d]]
    return (dbias.sum(broadcast, keepdim=True) if broadcast else dbias).to(bias.dtype)


class Seen(NamedTuple):
    """Cached results of `seen_from` for ranges that end at `hi`, by sizes."""

    hi: Tensor
    by_sizes: dict[tuple[int, ...], tuple[Tensor, Tensor]]


_seen = WeakTensorKeyDictionary()  # by `lo`, since the layers of a model use the same ranges


def seen_from(rule: KernelArgs, sizes: Sizes, M: int, N: int) -> tuple[Tensor, Tensor]:
    """Return `compute_seen_from`, about 170 torch operations, computed once for a mask that caches
    its ranges.

    Results are kept as long as the ranges, since a captured CUDA graph may read them. Ranges are
    cached for one stream of a GPU, and so are these results. A repeated call would compute them
    again, so these calls are not recorded.
    """
    do_not_record()
    assert rule.lo is not None and rule.hi is not None
    seen: Seen | None = _seen.get(rule.lo)
    if seen is None or seen.hi is not rule.hi:
        seen = Seen(rule.hi, {})
    of = sizes.Tq, sizes.Tk, M, N
    if of not in seen.by_sizes:
        queries = compute_seen_from(rule.lo, rule.hi, sizes, M, N)
        if not has_values(rule.lo):  # a replay overwrites what a captured CUDA graph computes
            return queries
        seen.by_sizes[of] = queries
        _seen[rule.lo] = seen
    return seen.by_sizes[of]


def compute_seen_from(
    lo: Tensor, hi: Tensor, sizes: Sizes, M: int, N: int
) -> tuple[Tensor, Tensor]:
    """Return for each tile of N keys and each range of the mask an interval of queries, `first` and
    `last`, (B|1, H|1, tiles, ranges) each.

    The interval contains all queries that see one of the keys in that range; its bounds are
    multiples of M, or Tq. If all queries have the same ranges, it has all queries or none.

    A strip of M queries sees an interval of tiles. Two overlapping intervals whose length is a
    power of 2 cover it, so the strip is written to these two (`low[level]`). Then every level
    passes its strips to the level of half the length. This takes O((strips + tiles) log tiles)
    operations instead of tiles x strips.
    """
    strips, tiles = math.ceil(sizes.Tq / M), math.ceil(sizes.Tk / N)
    if lo.shape[2] == 1:
        start = torch.arange(0, tiles * N, N, device=lo.device).unsqueeze(-1)
        seen = (torch.maximum(lo, start) < torch.minimum(hi, start + N)).int()
        return torch.zeros_like(seen), seen * sizes.Tq
    lo, hi = (x.expand(*x.shape[:2], sizes.Tq, -1) for x in (lo, hi))
    missing = (0, 0, 0, strips * M - sizes.Tq)
    sees = lo < hi
    begin = torch.where(sees, lo // N, tiles)
    end = torch.where(sees, -(-hi // N), 0)
    begin = torch.nn.functional.pad(begin, missing, value=tiles).unflatten(2, (strips, M)).amin(3)
    end = torch.nn.functional.pad(end, missing, value=0).unflatten(2, (strips, M)).amax(3)
    begin, end = (x.movedim(-1, -2).contiguous() for x in (begin, end))  # (b, h, ranges, strips)
    length = (end - begin).clamp(min=0)
    levels = max(tiles, 1).bit_length()
    level = torch.frexp(length.float()).exponent.long() - 1
    none = length == 0
    level = level.clamp(min=0)
    strip = torch.arange(strips, device=lo.device).expand_as(begin)
    low = torch.full((*begin.shape[:3], levels * tiles), strips, device=lo.device)
    high = torch.zeros_like(low)
    for tile in (begin, end - (1 << level)):
        where = (level * tiles + tile).masked_fill(none, 0)
        low.scatter_reduce_(-1, where, strip.masked_fill(none, strips), "amin")
        high.scatter_reduce_(-1, where, (strip + 1).masked_fill(none, 0), "amax")
    low, high = (x.unflatten(-1, (levels, tiles)) for x in (low, high))
    for i in range(levels - 1, 0, -1):
        half = 1 << (i - 1)
        for x, best in ((low, torch.minimum), (high, torch.maximum)):
            upper, lower = x[..., i, :], x[..., i - 1, :]
            lower.copy_(best(lower, upper))
            if half < tiles:
                lower[..., half:].copy_(best(lower[..., half:], upper[..., : tiles - half]))
    first, last = low[..., 0, :] * M, (high[..., 0, :] * M).clamp(max=sizes.Tq)
    return first.movedim(-1, -2).int().contiguous(), last.movedim(-1, -2).int().contiguous()
