"""Compute weights received by each key, pooled maps and exact rows, in a second sweep.

The first sweep computed the largest logit and the factor `share` of each row, from which weights
follow. A program owns a tile of keys of one head and walks over the queries, so the weights of a
key are added in one order, without atomic additions. A tile needs one product, where the forward
pass needs two. The pooled map and the received weights come from the same sums.
"""

import triton
import triton.language as tl

from .backward import weights_of_tile
from .tile import allowed_cells, key_range, load_keys, load_queries, load_rows


@triton.jit(do_not_specialize=["tiles"])
def sum_weights(
    q, k, top, share, received, pooled, factors, first, last, rule, sizes, tiles, q_bins, k_bins,
    slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the weights that N keys of one head receive: `received`, (B, H, Tk), over all queries,
    and `pooled`, (B, H, q_bins, tiles, slots), over each bin of queries, times the `factors` of the
    keys, (B|1, H|1, 1, Tk), or None. A slot is a bin of keys that overlaps the tile."""
    program = tl.program_id(0)
    tile = program % tiles
    program = program // tiles
    b = program // sizes.H
    one_head = program % sizes.H
    g = one_head // (sizes.H // sizes.G)
    keys = tile * N + tl.arange(0, N)
    key_tile = load_keys(k, b, g, tile * N, sizes.Tk, N, D, BLOCK_D, True)
    at_head = program.to(tl.int64) * sizes.Tq
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
            start, stop = tl.maximum(start, bin_start), tl.minimum(stop, bin_stop)
            # From `full_start` to `full_stop`, tiles of M queries that see all N keys.
            full_start, full_stop = stop, stop
            if BAND:
                full_start = tl.maximum(tile * N + N - 1 - rule.after, start)
                full_start = start + (full_start - start + M - 1) // M * M
                full_stop = tl.minimum(tile * N + rule.before + 1, stop)
                full_stop = full_start + tl.maximum(full_stop - full_start, 0) // M * M
                if (tile * N + N > sizes.Tk) | (full_start >= full_stop):
                    full_start, full_stop = stop, stop
            bounds = start, full_start, full_stop, stop
            for i in tl.static_range(3 if BAND else 1):
                cells = add_weights(
                    cells, bounds[i], bounds[i + 1], stop, q, top, share, rule, sizes, b, one_head,
                    at_head, keys, key_tile, j, D, BLOCK_D, M, BAND, i != 1, PRECISION,
                )  # fmt: skip
        acc = tl.sum(cells, 0)
        total += acc
        if pooled is not None:
            if factors is not None:  # a key of weight 0 adds 0, even if its factor is NaN
                line = b.to(tl.int64) * factors.b + one_head.to(tl.int64) * factors.h
                at = factors.at + line + keys.to(tl.int64) * factors.k
                factor = tl.load(at, mask=keys < sizes.Tk, other=0.0)
                acc = tl.where(acc == 0.0, 0.0, acc * factor)
            line = ((at_head // sizes.Tq * q_bins + q_bin) * tiles + tile) * slots
            for slot in range(0, slots):
                inside = key_bin == tl.min(key_bin, 0) + slot
                tl.store(pooled + line + slot, tl.sum(tl.where(inside, acc, 0.0), 0))
    if received is not None:
        tl.store(received + program.to(tl.int64) * sizes.Tk + keys, total, mask=keys < sizes.Tk)


@triton.jit
def add_weights(
    cells, start, end, stop, q, top, share, rule, sizes, b, one_head, at_head, keys, key_tile, j,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, BAND: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weights of the tiles of M queries from `start` to `end`, to `cells` (M, N). Queries
    from `stop` on have weight 0."""
    for begin in range(start, end, M):
        t = begin + tl.arange(0, M)
        real = t < stop
        t = tl.minimum(t, sizes.Tq - 1)
        h = one_head + t * 0
        allowed = (keys >= 0)[None, :]
        if MASKED:
            lo, hi = key_range(rule, sizes, b, h, t, j, BAND)
            allowed = allowed_cells(rule, sizes, b, h, t, keys, lo, hi)
        wanted = True
        if MASKED and rule.bits is not None:  # testing each tile would prevent pipelined loads
            wanted = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
        if wanted:
            queries = load_queries(q, b, one_head, begin, sizes.Tq, M, D, BLOCK_D, MASKED)
            w, _ = weights_of_tile(
                queries, key_tile, tl.load(top + at_head + t), tl.load(share + at_head + t), rule,
                b, h, t, keys, allowed, real, MASKED, PRECISION,
            )  # fmt: skip
            cells += w
    return cells


@triton.jit(do_not_specialize=["tiles", "q_bins", "k_bins", "slots"])
def pool_parts(
    parts, pooled, sizes, tiles, q_bins, k_bins, slots,
    N: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Sum the slots of the tiles of N keys, (B, H, q_bins, tiles, slots), into bins of keys, (B, H,
    q_bins, k_bins), in order, so that NaN stays in its bin. With `MEAN`, divide by the queries of
    the bin."""
    blocks = (k_bins + BLOCK - 1) // BLOCK
    line = tl.program_id(0) // blocks
    k_bin = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    start = (k_bin.to(tl.int64) * sizes.Tk // k_bins).to(tl.int32)
    stop = ((k_bin + 1).to(tl.int64) * sizes.Tk // k_bins).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, (sizes.Tk + k_bins - 1) // k_bins // N + 2):
        tile = start // N + i
        first_bin = (((tile * N).to(tl.int64) + 1) * k_bins - 1) // sizes.Tk
        inside = (tile * N < stop) & (k_bin < k_bins)
        at = (line.to(tl.int64) * tiles + tile) * slots + k_bin - first_bin
        total += tl.load(parts + at, mask=inside, other=0.0)
    if MEAN:
        q_bin = (line % q_bins).to(tl.int64)
        count = (q_bin + 1) * sizes.Tq // q_bins - q_bin * sizes.Tq // q_bins
        total = total / count.to(tl.float32)
    tl.store(pooled + line.to(tl.int64) * k_bins + k_bin, total, mask=k_bin < k_bins)


@triton.jit(do_not_specialize=["tiles", "count"])
def store_exact_rows(
    q, k, top, share, positions, out, rule, sizes, tiles, count,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the weights of the `count` queries at `positions`: (B, H, count, Tk)."""
    program = tl.program_id(0)
    tile = program % tiles
    program = program // tiles
    strips = (count + M - 1) // M
    strip = program % strips
    program = program // strips
    b = program // sizes.H
    one_head = program % sizes.H
    h = one_head + tl.zeros([M], tl.int32)
    g = one_head // (sizes.H // sizes.G)
    keys = tile * N + tl.arange(0, N)
    row = strip * M + tl.arange(0, M)
    real = row < count
    t = tl.load(positions + tl.minimum(row, count - 1)).to(tl.int32)
    key_tile = load_keys(k, b, g, tile * N, sizes.Tk, N, D, BLOCK_D, True)
    queries = load_rows(q, b, h, t, D, BLOCK_D)
    at = program.to(tl.int64) * sizes.Tq + t
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
    at = (program.to(tl.int64) * count + row)[:, None] * sizes.Tk + keys[None, :]
    tl.store(out + at, w, mask=real[:, None] & (keys < sizes.Tk)[None, :])
