"""The second sweep: weights received by each key, pooled maps and exact rows.

The first sweep left the largest logit and the share of each row, hence its weights. A program owns
a tile of keys of one head and walks over the queries, so what a key receives is added in one order
and without atomic additions. Of the forward's two products of a tile this is one; map and received
weights are taken from the same sums.
"""

import triton
import triton.language as tl

from .backward import weights_of_tile
from .tile import allowed_cells, key_range, load_keys, load_rows


@triton.jit(do_not_specialize=["tiles"])
def sum_weights(
    q, k, top, share, received, pooled, first, last, rule, sizes, tiles, q_bins, k_bins, slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What N keys of one head receive: `received` (B, H, Tk) of all queries, `pooled` of each bin
    of queries and, in `slots`, of each bin of keys that the tile touches:
    (B, H, q_bins, tiles, slots)."""
    place = tl.program_id(0)
    tile = place % tiles
    place = place // tiles
    b = place // sizes.H
    one_head = place % sizes.H
    h = one_head + tl.zeros([M], tl.int32)
    g = one_head // (sizes.H // sizes.G)
    keys = tile * N + tl.arange(0, N)
    key_tile = load_keys(k, b, g, keys, sizes.Tk, D, BLOCK_D, True)
    at_head = place.to(tl.int64) * sizes.Tq
    total = tl.zeros([N], tl.float32)
    key_bin = ((keys.to(tl.int64) + 1) * k_bins - 1) // sizes.Tk
    for q_bin in range(0, q_bins):
        bin_start = ((tile * 0 + q_bin).to(tl.int64) * sizes.Tq // q_bins).to(tl.int32)
        bin_stop = ((tile * 0 + q_bin + 1).to(tl.int64) * sizes.Tq // q_bins).to(tl.int32)
        cells = tl.zeros([M, N], tl.float32)
        for j in range(0, rule.ranges):
            if BAND:
                start = tl.maximum(tile * N - rule.after, 0)
                stop = tl.minimum(tile * N + N + rule.before, sizes.Tq)
            else:
                line = b.to(tl.int64) * first.b + one_head.to(tl.int64) * first.h
                start = tl.load(first.at + line + tile * first.q + j * first.k)
                stop = tl.load(last.at + line + tile * last.q + j * last.k)
            stop = tl.minimum(stop, bin_stop)
            for begin in range(tl.maximum(start, bin_start), stop, M):
                t = begin + tl.arange(0, M)
                real = t < stop
                t = tl.minimum(t, sizes.Tq - 1)
                lo, hi = key_range(rule, sizes, b, h, t, j, BAND)
                allowed = allowed_cells(rule, sizes, b, h, t, keys, lo, hi)
                if tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0:
                    queries = load_rows(q, b, h, t, D, BLOCK_D)
                    w, _ = weights_of_tile(
                        queries, key_tile, tl.load(top + at_head + t), tl.load(share + at_head + t),
                        rule, b, h, t, keys, allowed, real, True, PRECISION,
                    )  # fmt: skip
                    cells += w
        acc = tl.sum(cells, 0)
        total += acc
        if pooled is not None:
            line = ((at_head // sizes.Tq * q_bins + q_bin) * tiles + tile) * slots
            for slot in range(0, slots):
                inside = key_bin == tl.min(key_bin, 0) + slot
                tl.store(pooled + line + slot, tl.sum(tl.where(inside, acc, 0.0), 0))
    if received is not None:
        tl.store(received + place.to(tl.int64) * sizes.Tk + keys, total, mask=keys < sizes.Tk)


@triton.jit(do_not_specialize=["tiles", "count"])
def store_exact_rows(
    q, k, top, share, places, out, rule, sizes, tiles, count,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of `count` queries, whose positions are `places`: (B, H, count, Tk)."""
    place = tl.program_id(0)
    tile = place % tiles
    place = place // tiles
    strips = (count + M - 1) // M
    strip = place % strips
    place = place // strips
    b = place // sizes.H
    one_head = place % sizes.H
    h = one_head + tl.zeros([M], tl.int32)
    g = one_head // (sizes.H // sizes.G)
    keys = tile * N + tl.arange(0, N)
    row = strip * M + tl.arange(0, M)
    real = row < count
    t = tl.load(places + tl.minimum(row, count - 1)).to(tl.int32)
    key_tile = load_keys(k, b, g, keys, sizes.Tk, D, BLOCK_D, True)
    queries = load_rows(q, b, h, t, D, BLOCK_D)
    at = place.to(tl.int64) * sizes.Tq + t
    row_top, row_share = tl.load(top + at), tl.load(share + at)
    w = tl.zeros([M, N], tl.float32)
    for j in range(0, rule.ranges):
        lo, hi = key_range(rule, sizes, b, h, t, j, BAND)
        allowed = allowed_cells(rule, sizes, b, h, t, keys, lo, hi)
        one, _ = weights_of_tile(
            queries, key_tile, row_top, row_share, rule, b, h, t, keys, allowed, real, True,
            PRECISION,
        )  # fmt: skip
        w += one
    at = (place.to(tl.int64) * count + row)[:, None] * sizes.Tk + keys[None, :]
    tl.store(out + at, w, mask=real[:, None] & (keys < sizes.Tk)[None, :])
