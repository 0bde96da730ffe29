"""Launch the backward kernels: choose tiles, find which queries see them, and allocate buffers."""

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....torch_state import has_values
from ...operators import KernelArgs
from ..replay import on_device
from .arguments import KernelRule, Sizes, cells_if, kernel_rule, readable, rows, sizes_of
from .backward import bias_gradients, key_gradients, query_gradients, row_products
from .launch_forward import (
    Again,
    Table,
    Tiles,
    dot_precision,
    has_large_memory,
    has_largest_memory,
    head_block,
    hides_keys,
    tile_from,
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

# The same for capability 9.0 and 10.0.
LARGEST_KEY_GRADIENTS: Table = {
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
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, top: Tensor | None,
    share: Tensor | None, q: Tensor, k: Tensor, v: Tensor, rule: KernelArgs, bias_grad: bool,
    seen: tuple[Tensor, Tensor] | None, again: Again | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients of q, k, v, bias and sinks. The one of the bias is None without
    `bias_grad`, the one of the sinks without sinks.

    If `top` and `share` are None, the weights follow from `lse` alone. `seen` is the result of
    `seen_by_keys`. With `again`, the kernels compute carefully, and write the rows of its tensors
    that are not finite, in one split, if its flag is up (`attend`).
    """
    q, k, v, dout, out = (readable(x) for x in (q, k, v, dout, out))
    sizes = sizes_of(q, k)
    B, H, _, Tq, Tk = sizes
    D, DV = q.shape[3], v.shape[3]
    if again is None:
        new = torch.empty if Tk else torch.zeros  # without keys the kernels do not start
        dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    else:
        dq, dk, dv = cast("tuple[Tensor, Tensor, Tensor]", again[1:])
    bias, dbias, dsinks = rule.bias if bias_grad else None, None, None
    if bias is not None:
        dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=q.device)
    if rule.sinks is not None:
        dsinks = torch.zeros_like(rule.sinks)
    if not B * H * Tq:
        return dq, dk.zero_(), dv.zero_(), dbias, dsinks

    delta = q.new_empty((B, H, Tq), dtype=torch.float32)
    of_kernel = kernel_rule(rule)
    for_all: dict[str, Any] = dict(
        D=D, DV=DV, BLOCK_D=head_block(D), BLOCK_DV=head_block(DV), BAND=rule.lo is None,
        DROPS=rule.seed is not None, PRECISION=dot_precision(q.dtype),
    )  # fmt: skip
    all_lse = None
    if top is None or share is None:
        all_lse, top, share = lse.contiguous(), torch.empty_like(delta), torch.empty_like(delta)
    saved = top.contiguous(), share.contiguous(), delta
    flag = None if again is None else again.flag
    if again is None and hides_keys(rule, sizes):
        flag = q.new_empty(1, dtype=torch.int32)
    with on_device(q):
        start(
            row_products, math.ceil(B * H * Tq / 32), q.get_device(),
            rows(dout), rows(out), None if dlse is None else dlse.float().contiguous(), all_lse,
            *saved, *((None, flag) if again is None else (flag, None)), of_kernel.natural,
            H, Tq, B * H * Tq,
            DV=DV, BLOCK_DV=head_block(DV), M=32,
        )  # fmt: skip
        if Tk:
            tensors = q, k, v, dout
            if again is None:
                dk, dv = _start(
                    tensors, saved, (dq, dk, dv), flag, rule, of_kernel, seen, for_all
                )  # fmt: skip
            if flag is not None:
                of_kernel = of_kernel._replace(careful=1)
                _start(tensors, saved, (dq, dk, dv), flag, rule, of_kernel, seen, for_all)
            if bias is not None and bias.numel():
                dbias = _of_bias(bias, tensors, saved, rule, of_kernel, for_all)
    if rule.sinks is not None:
        share_of_sink = torch.exp(rule.sinks.view(-1, 1) - lse)
        share_of_sink = share_of_sink.masked_fill(lse == -math.inf, 0.0)
        dsinks = -(share_of_sink * delta).sum((0, 2))
    return dq, dk, dv, dbias, dsinks


def _start(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], saved: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor], flag: Tensor | None, rule: KernelArgs,
    of_kernel: KernelRule, seen: tuple[Tensor, Tensor] | None, for_all: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Start the kernels that write the gradients of q, k and v. Return the last two, which are
    others than those of `grads` if programs split the heads."""
    q, k, v, dout = tensors
    sizes, device = sizes_of(q, k), q.get_device()
    B, H, G, Tq, Tk = sizes
    of_q, of_k, of_v, of_dout = (rows(x) for x in tensors)
    tile = _tile(QUERY_GRADIENTS, q, v, rule)
    tiles = math.ceil(Tq / tile.queries)
    start(
        query_gradients, tiles * H * B, device,
        of_q, tile.view(k, tile.keys), tile.view(v, tile.keys), of_dout, *saved, rows(grads[0]),
        flag, rule.scale, of_kernel, sizes, tiles, **_launched(tile), **for_all,
    )  # fmt: skip
    tile = _key_tile(q, v, rule)
    tiles = math.ceil(Tk / tile.keys)
    splits, chunk = 1, H // G
    if of_kernel.careful is None:
        splits, chunk = splits_of_heads(H // G, tiles * G, Tq)
    parts = [*grads[1:]]
    if splits > 1:
        parts = [x.new_empty((splits, *x.shape), dtype=torch.float32) for x in parts]
    first, last = seen or (None, None)
    start(
        key_gradients, tiles * splits * G * B, device,
        tile.view(q, tile.queries), of_k, of_v, tile.view(dout, tile.queries), *saved,
        *(rows(x.flatten(0, -4)) for x in parts), flag, cells_if(first), cells_if(last),
        rule.scale, of_kernel, sizes, tiles, splits, chunk,
        TRANSPOSED=transposes_tiles(q, max(q.shape[3], v.shape[3])), **_launched(tile), **for_all,
    )  # fmt: skip
    dk, dv = parts if splits == 1 else [x.sum(0).to(q.dtype) for x in parts]
    return dk, dv


def splits_of_heads(group_size: int, programs: int, Tq: int) -> tuple[int, int]:
    """Return the number of splits of the heads that read the same keys, and the heads of each
    split, for an example that has `programs` programs without splits. The results of splits are
    added in the order of the heads."""
    chunk = max(group_size * programs // LEAST_PROGRAMS, math.ceil(LEAST_OF_SPLIT / Tq))
    chunk = min(chunk, group_size)
    return math.ceil(group_size / chunk), chunk


def _tile(table: Table, q: Tensor, v: Tensor, rule: KernelArgs) -> Tiles:
    block = max(head_block(q.shape[3]), head_block(v.shape[3]))
    tile = tile_from(table, q.shape[2], block, q.dtype, q.device)
    if rule.bias is not None:  # each stage holds a tile of the bias
        tile = tile._replace(stages=min(tile.stages, 2))
        if tile.keys > 64:
            tile = tile._replace(queries=min(tile.queries, 32))
    return tile


def transposes_tiles(q: Tensor, D: int) -> bool:
    """Return whether tiles that are summed over queries are transposed (backward.py).

    On capability 9.0 the matrix units then read the weights from registers. On 8.0 it takes fewer
    instructions for heads of more than 64 features, on 8.6 and 8.9 more (bench/LOG.md).
    """
    if has_largest_memory(q.device):
        return True
    return D > 64 and q.dtype != torch.float32 and has_large_memory(q.device)


def _key_tile(q: Tensor, v: Tensor, rule: KernelArgs) -> Tiles:
    largest = has_largest_memory(q.device)
    return _tile(LARGEST_KEY_GRADIENTS if largest else KEY_GRADIENTS, q, v, rule)


def bias_tile(q: Tensor, v: Tensor, rule: KernelArgs) -> Tiles:
    """Return the tile of `bias_gradients`, which has fewer keys where more would spill: with key
    ranges, and below capability 9.0 for heads of more than 64 features (bench/LOG.md)."""
    tile = _tile(QUERY_GRADIENTS, q, v, rule)
    if rule.lo is None and (has_largest_memory(q.device) or max(q.shape[3], v.shape[3]) <= 64):
        return tile
    return tile._replace(keys=min(tile.keys, 32))


def _launched(tile: Tiles) -> dict[str, int]:
    """Return the keywords of a backward kernel for this tile."""
    return dict(M=tile.queries, N=tile.keys, warps=tile.warps, stages=tile.stages)


def _of_bias(
    bias: Tensor, tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor], rule: KernelArgs, of_kernel: KernelRule,
    for_all: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Compute the gradient of a bias, in its shape and dtype."""
    q, k, v, _ = tensors
    sizes, tile = sizes_of(q, k), bias_tile(q, v, rule)
    q_tiles, k_tiles = math.ceil(sizes.Tq / tile.queries), math.ceil(sizes.Tk / tile.keys)
    B, H, Tq, Tk = bias.shape
    if Tq == 1 or Tk == 1:  # O(T) numbers for each head, summed afterwards
        B, H = sizes.B, sizes.H
    per_q, per_k = Tq > 1, Tk > 1
    dbias = torch.zeros(B, H, Tq, Tk, dtype=torch.float32, device=bias.device)
    programs = B * H * (q_tiles if per_q else 1) * (k_tiles if per_k else 1)
    start(
        bias_gradients, programs, dbias.get_device(),
        *(rows(x) for x in tensors), *saved, dbias, of_kernel, sizes, q_tiles, k_tiles,
        PER_B=B > 1, PER_H=H > 1, PER_Q=per_q, PER_K=per_k, **_launched(tile), **for_all,
    )  # fmt: skip
    broadcast = [d for d in (0, 1) if dbias.shape[d] != bias.shape[d]]
    return (dbias.sum(broadcast, keepdim=True) if broadcast else dbias).to(bias.dtype)


def seen_by_keys(q: Tensor, k: Tensor, v: Tensor, rule: KernelArgs) -> tuple[Tensor, Tensor] | None:
    """Return the queries that see each tile of keys (`seen_from`), or None for a band."""
    if rule.lo is None or 0 in (sizes := sizes_of(q, k)):
        return None
    tile = _key_tile(q, v, rule)
    return seen_from(rule, sizes, tile.queries, tile.keys)


class Seen(NamedTuple):
    """Cached results of `seen_from` for ranges that end at `hi`, by sizes."""

    hi: Tensor
    by_sizes: dict[tuple[int, ...], tuple[Tensor, Tensor]]


_seen = WeakTensorKeyDictionary()  # by `lo`, since the layers of a model use the same ranges


def seen_from(rule: KernelArgs, sizes: Sizes, M: int, N: int) -> tuple[Tensor, Tensor]:
    """Return `compute_seen_from`, about 170 torch operations, computed once for a mask that caches
    its ranges.

    Results are kept as long as the ranges, since a captured CUDA graph may read them. Ranges are
    cached for one stream of a GPU, and so are these results. They are arguments of a call that is
    repeated, which would otherwise compute them again.
    """
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
