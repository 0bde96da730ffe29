"""Compute the output, and sums of each row for gradients and statistics, in one sweep.

A program owns a tile of rows and walks over their keys once, with a running maximum, a running sum
and a running weighted sum (core/problem/online_softmax.py). A tile of M rows and N keys costs

    2 M N (D + Dv) flops on the matrix units,
    M N exp2,
    N (D + Dv) numbers of keys and values read; the tiles of a head share them through the cache.

So M is as large as registers can hold the (M, Dv) sum in float32. N is as large as shared memory
can hold two or three tiles of keys and values in flight.

Keys outside the ranges of all rows are never loaded. The middle of a range, which all rows of the
tile see, is computed without a mask. Few other tiles are empty (none with a window and a prefix).
Testing each would prevent the pipelining of loads, so tiles are tested only if the mask has bits.

If a head has few tiles of queries and many keys, programs split the keys, and `merge_splits` merges
their results (row_results.py). The lower bound for a single query is then one read of the keys and
values.
Source: Dao 2023, "FlashAttention-2"; Dao, Haziza, Massa & Sizov 2023, "Flash-Decoding".
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .arguments import Cells
from .row_results import finish, store_parts
from .tile import (
    above,
    allowed_cells,
    anchor,
    cleaned,
    finite,
    is_nonfinite,
    key_range,
    line_offsets,
    load_keys,
    load_rows,
    logits,
    nonfinite_rows,
    parts_of,
    product,
    row_hash,
    survivors,
)

# Triton 3.6 cannot compare a tuple, or find its length, if it contains None. So what is missing
# below is an empty tuple.
ABSENT: tuple[()] = ()


class Ranges(NamedTuple):
    """The key ranges of a group, (B|1, H|1, Tq|1, number) both."""

    lo: Cells
    hi: Cells
    number: int


class Ids(NamedTuple):
    """Ids of the queries, (B|1, 1, Tq, 1), and of the keys, (B|1, 1, 1, Tk)."""

    of_queries: Cells
    of_keys: Cells


class Group(NamedTuple):
    """A group of keys. Query t looks at a key of the group if the key is in [t - before, t + after]
    or in one of the ranges, and has the id of the query. Without these, it has all keys.

    A distance n of (before, after) is stored as 4 n + 2, which is never 1 or a multiple of 16. For
    these, Triton would compile the kernel again.
    """

    band: tuple[int, ...] = ABSENT
    ranges: Ranges | tuple[()] = ABSENT
    ids: Ids | tuple[()] = ABSENT


class Grouped(NamedTuple):
    """Groups of keys whose weights are summed, times the factors of the keys, (B|1, H|1, 1, Tk)."""

    groups: tuple[Group, ...]
    factors: Cells | tuple[()]


class PerKey(NamedTuple):
    """What statistics know of each key: its groups, and what is added to a logit before it is
    ranked for `best`, (B|1, H|1, 1, Tk), in units of the rule."""

    grouped: tuple[Grouped, ...] = ABSENT
    top_offsets: Cells | tuple[()] = ABSENT


# The kernel is not compiled again for values that change from one step of decoding to the next, or
# with the number of tiles; except if the number of keys becomes a multiple of 16, or stops being
# one.
@triton.jit(do_not_specialize=["tiles", "splits", "begin", "chunk", "n"])
def attend_tiles(
    q, k, v, out, results, parts, per_key, rule, sizes, flag, tiles, splits, begin, chunk, n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, N: tl.constexpr,
    BAND: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    MOMENT: tl.constexpr, TOP: tl.constexpr, WITH_OUT: tl.constexpr,
):  # fmt: skip
    if flag is not None and rule.careful is not None:  # 0 if the output is right (repair.py)
        if tl.load(flag) == 0:
            return
    # The last queries come first: under a causal mask they have the most keys.
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    program = program // tiles
    split = program % splits
    program = program // splits
    group_size = sizes.H // sizes.G
    shares = (group_size + HEADS - 1) // HEADS
    part = program % shares
    g = (program // shares) % sizes.G
    b = program // shares // sizes.G

    M: tl.constexpr = HEADS * QUERIES
    row = tl.arange(0, M)
    head = part * HEADS + row // QUERIES
    t = tile * QUERIES + row % QUERIES
    real = (head < group_size) & (t < sizes.Tq)
    h = g * group_size + tl.minimum(head, group_size - 1)
    t = tl.minimum(t, sizes.Tq - 1)

    if flag is not None and rule.careful is not None:
        real = real & nonfinite_rows(load_rows(out, b, h, t, DV, BLOCK_DV))
        if tl.max(real.to(tl.int32), 0) == 0:
            return
    queries = load_rows(q, b, h, t, D, BLOCK_D)
    hashes = row_hash(rule, b, h, t) if DROPS else row
    state = (
        tl.full([M], float("-inf"), tl.float32),
        tl.zeros([M], tl.float32),
        tl.zeros([M, BLOCK_DV], tl.float32),
        tl.zeros([M], tl.float32),
        no_sums(per_key, M),
        tl.full([M, TOP], float("-inf"), tl.float32),
        tl.zeros([M, TOP], tl.int32) - 1 - tl.arange(0, TOP)[None, :],  # no two keys are equal
    )

    first = begin + split * chunk
    last = tl.minimum(first + chunk, sizes.Tk)
    for j in range(0, rule.ranges):
        lo, hi = key_range(rule, sizes, b, h, t, j, BAND)
        sees = lo < hi
        start = tl.maximum(tl.min(tl.where(sees, lo, sizes.Tk)), first) // N * N
        stop = tl.minimum(tl.max(tl.where(sees, hi, 0)), last)
        bounds = parts_of(rule, lo, hi, start, stop, N)
        for i in tl.static_range(3):
            state = walk(
                state, bounds[i], bounds[i + 1], queries, k, v, rule, sizes, per_key, hashes,
                b, g, h, t, lo, hi, D, DV, BLOCK_D, BLOCK_DV, HEADS, N, i != 1, DROPS, PRECISION,
                MOMENT, TOP, WITH_OUT,
            )  # fmt: skip

    if flag is not None and rule.careful is None:
        if is_nonfinite(state[2]):
            tl.store(flag, 1)
    if parts.outputs is not None:
        store_parts(parts, state, sizes, splits, split, b, h, t, real, DV, BLOCK_DV, TOP)
    else:
        finish(out, results, state, rule, sizes, n, b, h, t, real, DV, BLOCK_DV)


@triton.jit
def walk(
    state, start, stop, queries, k, v, rule, sizes, per_key, hashes, b, g, h, t, lo, hi,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, MOMENT: tl.constexpr, TOP: tl.constexpr, WITH_OUT: tl.constexpr,
):  # fmt: skip
    """Update the state by the tiles of N keys from `start` to `stop`."""
    for begin in range(start, stop, N):
        keys = begin + tl.arange(0, N)
        allowed = (keys >= 0)[None, :]
        if MASKED:
            allowed = allowed_cells(rule, sizes, b, h, t, keys, lo, hi)
        wanted = True
        if MASKED and rule.bits is not None:  # ranges alone do not show which tiles are empty
            wanted = tl.max(tl.max(allowed.to(tl.int32), 1), 0) > 0
        if wanted:
            state = take(
                state, queries, k, v, rule, sizes, per_key, hashes, b, g, h, t, begin, keys,
                allowed, D, DV, BLOCK_D, BLOCK_DV, HEADS, MASKED, DROPS, PRECISION, MOMENT, TOP,
                WITH_OUT,
            )  # fmt: skip
    return state


@triton.jit
def take(
    state, queries, k, v, rule, sizes, per_key, hashes, b, g, h, t, begin, keys, allowed,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
    MOMENT: tl.constexpr, TOP: tl.constexpr, WITH_OUT: tl.constexpr,
):  # fmt: skip
    """Update the state by one tile of keys: logits (M, N), powers of 2, and weighted values."""
    top, total, acc, moment, of_groups, best, where = state
    key_tile = load_keys(k, b, g, begin, sizes.Tk, keys.shape[0], D, BLOCK_D, MASKED)
    products = product(queries, tl.trans(key_tile), None, PRECISION)
    x, _ = logits(products, rule, b, h, t, keys, allowed, MASKED)

    new_top = tl.maximum(top, tl.max(x, 1))
    base = anchor(new_top)
    exponents = above(x, base, rule)
    powers = tl.exp2(exponents)
    rescale = tl.exp2((top - base) * rule.unit)
    if MOMENT:
        # exp2(-1000) is 0, and -1000 times 0 is 0, whereas -inf times 0 is NaN.
        shift = tl.maximum((top - base) * rule.unit, -1000.0)
        below = tl.maximum(exponents, -1000.0)
        moment = rescale * (moment + shift * total) + tl.sum(powers * below, 1)
    total = total * rescale + tl.sum(powers, 1)
    of_groups = add_groups(
        of_groups, per_key, rescale, powers, sizes, b, h, t, begin, HEADS, MASKED
    )
    if TOP > 1:
        ranked = x
        if len(per_key.top_offsets) > 0:
            offsets = load_per_key(per_key.top_offsets, b, h, keys, sizes.Tk, HEADS, MASKED)
            ranked = tl.where(x == float("-inf"), x, x + offsets)
        best, where = keep_largest(best, where, ranked, keys, TOP)

    if WITH_OUT:
        values = load_keys(v, b, g, begin, sizes.Tk, keys.shape[0], DV, BLOCK_DV, MASKED)
        if DROPS:
            powers = powers * survivors(rule, hashes, keys)
        acc = acc * rescale[:, None]
        if MASKED and rule.careful is not None:
            seen = x != float("-inf")
            acc = add_masked(acc, powers, values, seen, PRECISION)
        else:
            acc = product(powers.to(values.dtype), values, acc, PRECISION)
    return new_top, total, acc, moment, of_groups, best, where


@triton.jit
def no_sums(per_key, M: tl.constexpr):
    """Return a sum of 0 for each group, (M,) each."""
    sums = ()
    for i in tl.static_range(len(per_key.grouped)):
        for _ in tl.static_range(len(per_key.grouped[i].groups)):
            sums += (tl.zeros([M], tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def add_groups(
    sums, per_key, rescale, powers, sizes, b, h, t, begin,
    HEADS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the powers of a tile, times the factors of their keys, to the sums of their groups. Tiles
    outside the ranges of a group cost nothing."""
    updated = ()
    for i in tl.static_range(len(per_key.grouped)):
        groups, factors = per_key.grouped[i].groups, per_key.grouped[i].factors
        terms = powers
        if len(factors) > 0:
            keys = begin + tl.arange(0, powers.shape[1])
            numbers = load_per_key(factors, b, h, keys, sizes.Tk, HEADS, MASKED)
            # A key of weight 0 adds 0, even if its factor is NaN.
            terms = tl.where(powers == 0.0, 0.0, powers * numbers)
        for j in tl.static_range(len(groups)):
            group = groups[j]
            total = sums[len(updated)] * rescale
            if len(group.ranges) > 0:
                for n in range(0, group.ranges.number):
                    lo = load_bound(group.ranges.lo, b, h, t, n)
                    hi = load_bound(group.ranges.hi, b, h, t, n)
                    total = add_range(total, lo, hi, group, terms, sizes, b, h, t, begin, MASKED)
            elif len(group.band) > 0:
                lo, hi = t - (group.band[0] >> 2), t + (group.band[1] >> 2) + 1
                total = add_range(total, lo, hi, group, terms, sizes, b, h, t, begin, MASKED)
            else:
                total += sum_group(group, terms, sizes, b, h, t, begin, MASKED)
            updated += (total,)  # type: ignore[assignment]
    return updated


@triton.jit
def add_range(total, lo, hi, group, terms, sizes, b, h, t, begin, MASKED: tl.constexpr):
    """Add what a tile has in the range [lo, hi) of each row."""
    if (tl.min(lo) < begin + terms.shape[1]) & (tl.max(hi) > begin):
        # Relative to `begin`, because Triton would compare keys in 64 bits.
        key = tl.arange(0, terms.shape[1])[None, :]
        inside = (key >= (lo - begin)[:, None]) & (key < (hi - begin)[:, None])
        terms = tl.where(inside, terms, 0.0)
        total += sum_group(group, terms, sizes, b, h, t, begin, MASKED)
    return total


@triton.jit
def sum_group(group, terms, sizes, b, h, t, begin, MASKED: tl.constexpr):
    """Sum the terms of the keys that have the id of the row."""
    if len(group.ids) > 0:
        of_query = tl.load(group.ids.of_queries.at + line_offsets(group.ids.of_queries, b, h, t))
        keys = begin + tl.arange(0, terms.shape[1])
        of_key = load_per_key(group.ids.of_keys, b, h, keys, sizes.Tk, 1, MASKED)
        terms = tl.where(of_key == of_query[:, None], terms, 0.0)
    return tl.sum(terms, 1)


@triton.jit
def load_bound(view, b, h, t, i):
    """Load the bound of range i of each row."""
    return tl.load(view.at + line_offsets(view, b, h, t) + i * view.k).to(tl.int32)


@triton.jit
def load_per_key(view, b, h, keys, Tk, HEADS: tl.constexpr, BOUND: tl.constexpr):
    """Load a number for each key: (1, N), or (M, N) if the rows have several heads. With `BOUND`,
    numbers beyond Tk are 0."""
    at = view.at + b.to(tl.int64) * view.b + (keys.to(tl.int64) * view.k)[None, :]
    if HEADS == 1:
        at += tl.max(h, 0).to(tl.int64) * view.h
    else:
        at += (h.to(tl.int64) * view.h)[:, None]
    if BOUND:
        return tl.load(at, mask=(keys < Tk)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def add_masked(acc, powers, values, seen, PRECISION: tl.constexpr):
    """Compute acc + powers @ values so that NaN and infinity in a value reach only the rows that
    see it. In a plain product they reach all rows, as 0 times NaN is NaN. Finite values cost only a
    comparison."""
    clean = cleaned(values)
    acc = product(powers.to(values.dtype), clean, acc, PRECISION)
    bad = tl.where(finite(values), 0, 1)
    if tl.max(tl.max(bad, 1), 0) > 0:
        # One product counts all three kinds, exactly in float32 for up to 255 keys: NaN counts as
        # 1/256, inf as 1, -inf as 256. Three products would take the registers of the loop.
        wide = values.to(tl.float32)
        code = tl.where(wide != wide, 1 / 256, tl.where(wide > 0, 1.0, 256.0))
        code = tl.where(bad > 0, code, 0.0).to(tl.float16)
        counts = (tl.dot(seen.to(tl.float16), code) * 256).to(tl.int32)
        nan, above, below = counts & 255, (counts >> 8) & 255, counts >> 16
        # Added, not assigned: infinities of both signs, also of an earlier tile, give NaN.
        acc += tl.where(nan > 0, float("nan"), 0.0) + tl.where(above > 0, float("inf"), 0.0)
        acc += tl.where(below > 0, float("-inf"), 0.0)
    return acc


@triton.jit
def keep_largest(best, where, x, keys, TOP: tl.constexpr):
    """Insert the largest logits of a tile into the `best` of each row, which is not sorted.

    The largest logit of each row in the tile decides whether a row takes one, so a tile from which
    no row takes one costs M x TOP comparisons. A row takes one logit at a time, at most TOP of a
    tile. The lowest key comes first among equal logits. For a small TOP the loop is unrolled,
    because a loop here would prevent the pipelining of loads in the walk over the keys.
    """
    more = exceeds(x, best)
    if TOP <= 8:
        for _ in tl.static_range(TOP):
            if more:
                best, where, x = keep_one(best, where, x, keys)
                more = exceeds(x, best)
    else:
        while more:
            best, where, x = keep_one(best, where, x, keys)
            more = exceeds(x, best)
    return best, where


@triton.jit
def exceeds(x, best):
    """Return whether the largest logit of some row exceeds the smallest in its `best`. The answers
    of the rows are reshaped, because Triton 3.7 cannot reduce them as they are for capability 10.0:
    their layout is that of a product without its columns."""
    more = (tl.max(x, 1) > tl.min(best, 1)).to(tl.int32)
    return tl.max(tl.reshape(more, [2, more.shape[0] // 2])) > 0


@triton.jit
def keep_one(best, where, x, keys):
    """Replace the smallest in `best` by the largest logit of the row, if that is larger, and set
    that logit to -inf in `x`."""
    largest, least = tl.max(x, 1), tl.min(best, 1)
    key = tl.min(tl.where(x == largest[:, None], keys[None, :], 2147483647), 1)
    # Among equal entries of `best`, the one with the highest key is replaced.
    last = tl.max(tl.where(best == least[:, None], where, -2147483648), 1)
    replace = (where == last[:, None]) & (largest > least)[:, None]
    best = tl.where(replace, largest[:, None], best)
    where = tl.where(replace, key[:, None], where)
    x = tl.where(keys[None, :] == key[:, None], float("-inf"), x)
    return best, where, x
