"""Compute gradients, without storing anything of the size queries x keys.

The weights of a tile are recomputed from `top`, the largest logit of each row, and the factor
`share` (row_results.py, `RowResults`):

    w = exp2(x - top) share          dV = (drop w)^T dO         dP = drop (dO V^T)
    dx = w (dP - delta)              delta = Σ dO O - dlse      dS = dx (1 - tanh^2) with a soft cap
    dQ = scale dS K                  dK = scale dS^T Q          dbias = Σ dx where it broadcasts

Each program owns the sums that it computes, so there are no atomic additions, and the bits are the
same in every run. A tile needs five products. `query_gradients` computes three and `key_gradients`
four of them; computing two twice is the price of the fixed order. If a bias needs a gradient,
`bias_gradients` computes two more.
Source: Dao 2023, "FlashAttention-2".
"""

import triton
import triton.language as tl

from .tile import (
    above,
    allowed_cells,
    anchor,
    cleaned,
    is_nonfinite,
    key_range,
    load_keys,
    load_queries,
    load_rows,
    logits,
    nonfinite_rows,
    of_keys,
    of_rows,
    parts_of,
    product,
    row_hash,
    store_rows,
    survivors,
)


@triton.jit(do_not_specialize=["count"])
def row_products(
    dout, out, dlse, lse, top, share, delta, flag, lowered, natural, H, Tq, count,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute delta = Σ dO O - dlse of each row. A program computes M rows, and reads (M, Dv)
    twice. With `lse`, it becomes `top`, and every `share` 1, which give the same weights. The flag
    `lowered` of later kernels becomes 0."""
    if flag is not None:  # on the device: 0 where another kernel's gradients hold (repair.py)
        if tl.load(flag) == 0:
            return
    if lowered is not None:
        tl.store(lowered, 0)
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    real = row < count
    at = tl.minimum(row, count - 1)
    b, h, t = at // Tq // H, at // Tq % H, at % Tq
    of_out = load_rows(dout, b, h, t, DV, BLOCK_DV).to(tl.float32)
    product = tl.sum(of_out * load_rows(out, b, h, t, DV, BLOCK_DV).to(tl.float32), 1)
    if dlse is not None:
        product -= tl.load(dlse + at)
    tl.store(delta + at, product, mask=real)
    if lse is not None:
        nats = tl.load(lse + at)
        tl.store(top + at, anchor(nats) / natural, mask=real)
        tl.store(share + at, tl.where(nats == float("-inf"), 0.0, 1.0), mask=real)


@triton.jit
def weights_of_tile(
    queries, key_tile, top, share, rule, b, h, t, keys, allowed, real,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Compute the weights, (M, N), and the tanh of the soft cap.

    Products of a transposed tile may differ from those of the forward pass in the last bit, which
    is 2e31 at 3e38. Therefore a logit is limited to the largest of its row; NaN is kept.

    The `share` of a row that is not `real` is 0. If numbers of such a row or
    of masked cells may be NaN, the rule must be careful.
    """
    if TRANSPOSED:
        products = product(key_tile, tl.trans(queries), None, PRECISION)
    else:
        products = product(queries, tl.trans(key_tile), None, PRECISION)
    x, t_cap = logits(products, rule, b, h, t, keys, allowed, MASKED, TRANSPOSED)
    limited = tl.minimum(x, of_rows(top, TRANSPOSED), propagate_nan=tl.PropagateNan.ALL)
    w = tl.exp2(above(limited, top, rule, TRANSPOSED)) * of_rows(share, TRANSPOSED)
    if MASKED and rule.careful is not None:
        w = tl.where((x == float("-inf")) | (of_rows(real, TRANSPOSED) == 0), 0.0, w)
    return w, t_cap


@triton.jit
def score_gradients(
    w, t_cap, dout_tile, value_tile, delta, rule, hashes, keys,
    DROPS: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Compute dx, the gradients of the logits, and dS, those of the scaled products, (M, N)."""
    if TRANSPOSED:
        dp = product(value_tile, tl.trans(dout_tile), None, PRECISION)
    else:
        dp = product(dout_tile, tl.trans(value_tile), None, PRECISION)
    if DROPS:
        dp = dp * survivors(rule, hashes, keys, TRANSPOSED)
    dx = w * (dp - of_rows(delta, TRANSPOSED))
    if rule.careful is not None:
        # The gradient is 0 for a weight of 0, also if a masked key or value holds NaN.
        dx = tl.where(w == 0.0, 0.0, dx)
    ds = dx
    if rule.cap is not None:
        ds = dx * (1.0 - t_cap * t_cap)
        if rule.careful is not None:
            ds = tl.where(w == 0.0, 0.0, ds)
    return dx, ds


@triton.jit(do_not_specialize=["tiles"])
def query_gradients(
    q, k, v, dout, top, share, delta, dq, flag, scale, rule, sizes, tiles,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ of M queries of one head, by the same walk over keys as the forward pass."""
    if flag is not None and rule.careful is not None:
        if tl.load(flag) == 0:
            return
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    program = program // tiles
    b = program // sizes.H
    t = tile * M + tl.arange(0, M)
    real = t < sizes.Tq
    t = tl.minimum(t, sizes.Tq - 1)
    one_head = program % sizes.H
    h = one_head + t * 0
    g = one_head // (sizes.H // sizes.G)
    at = program.to(tl.int64) * sizes.Tq + t
    stored = real
    if flag is not None and rule.careful is not None:
        stored = real & nonfinite_rows(load_rows(dq, b, h, t, D, BLOCK_D))
        if tl.max(stored.to(tl.int32), 0) == 0:
            return

    queries = load_queries(q, b, one_head, tile * M, sizes.Tq, M, D, BLOCK_D, True)
    dout_tile = load_queries(dout, b, one_head, tile * M, sizes.Tq, M, DV, BLOCK_DV, True)
    row_top, row_delta = tl.load(top + at), tl.load(delta + at)
    row_share = tl.load(share + at, mask=real, other=0.0)
    hashes = row_hash(rule, b, h, t) if DROPS else t
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    for j in range(0, rule.ranges):
        lo, hi = key_range(rule, sizes, b, h, t, j, BAND)
        sees = lo < hi
        start = tl.min(tl.where(sees, lo, sizes.Tk)) // N * N
        stop = tl.max(tl.where(sees, hi, 0))
        bounds = parts_of(rule, lo, hi, start, stop, N)
        for i in tl.static_range(3):
            acc = walk_keys(
                acc, bounds[i], bounds[i + 1], queries, dout_tile, row_top, row_share, row_delta,
                real, k, v, rule, sizes, hashes, b, g, h, t, lo, hi, D, DV, BLOCK_D, BLOCK_DV, N,
                i != 1, DROPS, PRECISION,
            )  # fmt: skip
    if flag is not None and rule.careful is None:
        if is_nonfinite(acc):
            tl.store(flag, 1)
    store_rows(dq, b, h, t, acc * scale, stored, D, BLOCK_D)


@triton.jit
def walk_keys(
    acc, start, stop, queries, dout_tile, top, share, delta, real, k, v, rule, sizes, hashes,
    b, g, h, t, lo, hi,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    N: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add dS K of the tiles of N keys from `start` to `stop`."""
    for begin in range(start, stop, N):
        keys = begin + tl.arange(0, N)
        allowed = (keys >= 0)[None, :]
        if MASKED:
            allowed = allowed_cells(rule, sizes, b, h, t, keys, lo, hi)
        wanted = True
        if MASKED and rule.bits is not None:
            wanted = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
        if wanted:
            key_tile = load_keys(k, b, g, begin, sizes.Tk, N, D, BLOCK_D, MASKED)
            value_tile = load_keys(v, b, g, begin, sizes.Tk, N, DV, BLOCK_DV, MASKED)
            w, t_cap = weights_of_tile(
                queries, key_tile, top, share, rule, b, h, t, keys, allowed, real, MASKED,
                PRECISION,
            )  # fmt: skip
            _, ds = score_gradients(
                w, t_cap, dout_tile, value_tile, delta, rule, hashes, keys, DROPS, PRECISION
            )
            if MASKED and rule.careful is not None:
                key_tile = cleaned(key_tile)
            acc = product(ds.to(key_tile.dtype), key_tile, acc, PRECISION)
    return acc


@triton.jit
def nonnegative(view):
    """Assume strides that are not negative, so that products of 64 bits take less."""
    if not isinstance(view, tl.tensor_descriptor):
        tl.assume(view.h >= 0)
        tl.assume(view.t >= 0)


@triton.jit
def place_of_keys(program, tiles, splits, sizes):
    """Return the tile of keys of a program, the split of the heads, the key head, and the
    example."""
    of_head, of_group = program // tiles, program // tiles // splits
    return program % tiles, of_head % splits, of_group % sizes.G, of_group // sizes.G


@triton.jit(do_not_specialize=["tiles", "splits", "chunk"])
def key_gradients(
    q, k, v, dout, top, share, delta, dk, dv, flag, first, last, scale, rule, sizes, tiles,
    splits, chunk,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of N keys of one key head, (splits B, G, Tk, ...).

    A program sums over `chunk` of the query heads that read this key head, and over the queries
    that may see one of the keys: for each range of the mask, those from `first` to `last`.
    """
    if flag is not None and rule.careful is not None:
        if tl.load(flag) == 0:
            return
    nonnegative(q)
    nonnegative(dout)
    tile, split, g, b = place_of_keys(tl.program_id(0), tiles, splits, sizes)
    keys = tile * N + tl.arange(0, N)
    example, last_key = split * sizes.B + b, tl.minimum(keys, sizes.Tk - 1)
    stored_dk, stored_dv = keys < sizes.Tk, keys < sizes.Tk
    if flag is not None and rule.careful is not None:
        stored_dk &= nonfinite_rows(load_rows(dk, example, g, last_key, D, BLOCK_D))
        stored_dv &= nonfinite_rows(load_rows(dv, example, g, last_key, DV, BLOCK_DV))
        if tl.max((stored_dk | stored_dv).to(tl.int32), 0) == 0:
            return
    key_tile = load_keys(k, b, g, tile * N, sizes.Tk, N, D, BLOCK_D, True)
    value_tile = load_keys(v, b, g, tile * N, sizes.Tk, N, DV, BLOCK_DV, True)
    group_size = sizes.H // sizes.G
    state = tl.zeros([N, BLOCK_D], tl.float32), tl.zeros([N, BLOCK_DV], tl.float32)
    head_stop = tl.minimum(split * chunk + chunk, group_size)
    for head in tl.range(split * chunk, head_stop, num_stages=1, disable_licm=True):
        # These are the same in each iteration. If the compiler saw that, it would compute them, and
        # the addresses of three loops, before the loop, in registers that spill.
        program = tl.minimum(tl.program_id(0), tl.num_programs(0) + head)
        tile, _, g, b = place_of_keys(program, tiles, splits, sizes)
        begin = tile * N
        h = g * group_size + head
        at_head = (b * sizes.H + h).to(tl.int64) * sizes.Tq
        for j in range(0, rule.ranges):
            if BAND:
                # From `full_start` to `full_stop` the queries see all N keys.
                start = tl.maximum(begin - rule.after, 0) // M * M
                stop = tl.minimum(begin + N + rule.before, sizes.Tq)
                full_start = (tl.maximum(begin + N - 1 - rule.after, 0) + M - 1) // M * M
                full_start = tl.maximum(tl.minimum(full_start, stop), start)
                full_stop = tl.minimum(begin + rule.before + 1, sizes.Tq) // M * M
                full_stop = tl.maximum(full_stop, full_start)
                full_stop = tl.where(begin + N > sizes.Tk, full_start, full_stop)
            else:
                line = b.to(tl.int64) * first.b + h.to(tl.int64) * first.h
                start = tl.load(first.at + line + tile * first.q + j * first.k)
                stop = tl.load(last.at + line + tile * last.q + j * last.k)
                full_start, full_stop = stop, stop
                if rule.bits is None:
                    # If all queries see the same keys, as with padding, they may see all N.
                    lo, hi = key_range(rule, sizes, b, h, h * 0, j, BAND)
                    covered = (lo <= tile * N) & (hi >= tile * N + N)
                    covered = covered & (rule.lo.q == 0) & (rule.hi.q == 0)
                    full_start = tl.where(covered, start, stop)
                    full_stop = tl.where(covered, stop // M * M, stop)
            bounds = start, full_start, full_stop, stop
            for i in tl.static_range(3 if rule.bits is None else 1):
                state = walk_queries(
                    state, bounds[i], bounds[i + 1], key_tile, value_tile, q, dout, top, share,
                    delta, rule, sizes, b, h, at_head, keys, j, D, DV, BLOCK_D, BLOCK_DV, M, BAND,
                    i != 1, DROPS, PRECISION, TRANSPOSED,
                )  # fmt: skip
    dk_acc, dv_acc = state
    if flag is not None and rule.careful is None:
        if is_nonfinite(dk_acc) | is_nonfinite(dv_acc):
            tl.store(flag, 1)
    if flag is None or rule.careful is None:
        # Computed again, since registers would hold them in the loops.
        program = tl.minimum(tl.program_id(0), tl.num_programs(0) - 1)
        tile, split, g, b = place_of_keys(program, tiles, splits, sizes)
        keys = tile * N + tl.arange(0, N)
        example, last_key = split * sizes.B + b, tl.minimum(keys, sizes.Tk - 1)
        stored_dk, stored_dv = keys < sizes.Tk, keys < sizes.Tk
    store_rows(dk, example, g, last_key, dk_acc * scale, stored_dk, D, BLOCK_D)
    store_rows(dv, example, g, last_key, dv_acc, stored_dv, DV, BLOCK_DV)


@triton.jit
def walk_queries(
    state, start, stop, key_tile, value_tile, q, dout, top, share, delta, rule, sizes,
    b, h, at_head, keys, j,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    M: tl.constexpr, BAND: tl.constexpr, MASKED: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and w^T dO of the tiles of M queries of head h from `start` to `stop`."""
    dk_acc, dv_acc = state
    for begin in range(start, stop, M):
        t = begin + tl.arange(0, M)
        real = t < sizes.Tq
        t = tl.minimum(t, sizes.Tq - 1)
        heads = h + t * 0
        allowed = of_keys(keys >= 0, TRANSPOSED)
        if MASKED:
            lo, hi = key_range(rule, sizes, b, heads, t, j, BAND)
            allowed = allowed_cells(rule, sizes, b, heads, t, keys, lo, hi, TRANSPOSED)
        wanted = True
        if MASKED and rule.bits is not None:
            wanted = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
        if wanted:
            queries = load_queries(q, b, h, begin, sizes.Tq, M, D, BLOCK_D, MASKED)
            dout_tile = load_queries(dout, b, h, begin, sizes.Tq, M, DV, BLOCK_DV, MASKED)
            row_top, row_share = tl.load(top + at_head + t), tl.load(share + at_head + t)
            if MASKED:
                row_share = tl.where(real, row_share, 0.0)
            hashes = row_hash(rule, b, heads, t) if DROPS else t
            w, t_cap = weights_of_tile(
                queries, key_tile, row_top, row_share, rule, b, heads, t, keys, allowed, real,
                MASKED, PRECISION, TRANSPOSED,
            )  # fmt: skip
            _, ds = score_gradients(
                w, t_cap, dout_tile, value_tile, tl.load(delta + at_head + t), rule, hashes, keys,
                DROPS, PRECISION, TRANSPOSED,
            )  # fmt: skip
            if DROPS:
                w = w * survivors(rule, hashes, keys, TRANSPOSED)
            if MASKED and rule.careful is not None:
                # NaN in a row must reach only the keys that it sees.
                bad = nonfinite_rows(dout_tile)
                w = tl.where(of_rows(bad, TRANSPOSED) & (w != 0.0), float("nan"), w)
                dout_tile, queries = cleaned(dout_tile), cleaned(queries)
            w = w.to(dout_tile.dtype)
            dv_acc = product(w if TRANSPOSED else tl.trans(w), dout_tile, dv_acc, PRECISION)
            ds = ds.to(queries.dtype)
            dk_acc = product(ds if TRANSPOSED else tl.trans(ds), queries, dk_acc, PRECISION)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["q_tiles", "k_tiles"])
def bias_gradients(
    q, k, v, dout, top, share, delta, dbias, rule, sizes, q_tiles, k_tiles,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr, PER_B: tl.constexpr,
    PER_H: tl.constexpr, PER_Q: tl.constexpr, PER_K: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dbias, contiguous, (B, H, Tq, Tk) with 1 where the bias broadcasts. A program owns
    M x N entries, and sums over the dimensions that broadcast."""
    program = tl.program_id(0)
    own_k = program % k_tiles if PER_K else program * 0
    program = program // k_tiles if PER_K else program
    own_q = program % q_tiles if PER_Q else program * 0
    program = program // q_tiles if PER_Q else program
    own_h = program % sizes.H if PER_H else program * 0
    own_b = program // sizes.H if PER_H else program
    acc = tl.zeros([M, N], tl.float32)
    for head in range(0, (1 if PER_B else sizes.B) * (1 if PER_H else sizes.H)):
        b = own_b + (head if PER_H else head // sizes.H)
        one_head = own_h if PER_H else program * 0 + head % sizes.H
        h = one_head + tl.zeros([M], tl.int32)
        g = one_head // (sizes.H // sizes.G)
        for i in range(0, 1 if PER_Q else q_tiles):
            t = (own_q + i) * M + tl.arange(0, M)
            real = t < sizes.Tq
            t = tl.minimum(t, sizes.Tq - 1)
            at = (b.to(tl.int64) * sizes.H + one_head) * sizes.Tq + t
            queries = load_rows(q, b, h, t, D, BLOCK_D)
            dout_tile = load_rows(dout, b, h, t, DV, BLOCK_DV)
            row_top, row_delta = tl.load(top + at), tl.load(delta + at)
            row_share = tl.load(share + at, mask=real, other=0.0)
            hashes = row_hash(rule, b, h, t) if DROPS else t
            for n in range(0, 1 if PER_K else k_tiles):
                begin = (own_k + n) * N
                keys = begin + tl.arange(0, N)
                for j in range(0, rule.ranges):
                    lo, hi = key_range(rule, sizes, b, h, t, j, BAND)
                    allowed = allowed_cells(rule, sizes, b, h, t, keys, lo, hi)
                    if tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0:
                        key_tile = load_keys(k, b, g, begin, sizes.Tk, N, D, BLOCK_D, True)
                        value_tile = load_keys(v, b, g, begin, sizes.Tk, N, DV, BLOCK_DV, True)
                        w, t_cap = weights_of_tile(
                            queries, key_tile, row_top, row_share, rule, b, h, t, keys, allowed,
                            real, True, PRECISION,
                        )  # fmt: skip
                        dx, _ = score_gradients(
                            w, t_cap, dout_tile, value_tile, row_delta, rule, hashes, keys, DROPS,
                            PRECISION,
                        )  # fmt: skip
                        acc += dx
    row, key = own_q * M + tl.arange(0, M), own_k * N + tl.arange(0, N)
    line = program.to(tl.int64) * (sizes.Tq if PER_Q else 1)
    width = sizes.Tk if PER_K else 1
    if PER_Q and PER_K:
        at = (line + row)[:, None] * width + key[None, :]
        tl.store(dbias + at, acc, mask=(row < sizes.Tq)[:, None] & (key < sizes.Tk)[None, :])
    elif PER_Q:
        tl.store(dbias + line + row, tl.sum(acc, 1), mask=row < sizes.Tq)
    elif PER_K:
        tl.store(dbias + line * width + key, tl.sum(acc, 0), mask=key < sizes.Tk)
    else:
        tl.store(dbias + line, tl.sum(tl.sum(acc, 1), 0))
