"""Finish rows after their last key: store the output, and what statistics and gradients need.

If one program has all keys of a row, it finishes the row itself (forward.py). Otherwise the
programs store `Parts`, and `merge_splits` merges and finishes them. So no statistic of rows needs
another kernel, or an operation of torch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile import anchor, store_rows


class RowResults(NamedTuple):
    """The outputs for each row, (B, H, Tq) each unless stated; None if not requested.

    A weight is exp2((x - top) unit) share, and a power is exp2((x - top) unit). Sums are without
    the sink (problem/online_softmax.py), `share` and `lse` with it. `top` is in units of the rule,
    everything else in nats.
    """

    top: Any = None  # the largest logit, or 0 if it is -inf
    largest: Any = None  # the same in nats
    sum: Any = None  # of the powers
    share: Any = None
    lse: Any = None
    moment: Any = None  # the sum of the powers times (x - top)
    entropy: Any = None
    groups: Any = None  # the powers of each group of keys, (groups, B, H, Tq)
    masses: Any = None  # the weights of each group, (groups, B, H, Tq)
    scores: Any = None  # the n largest logits in falling order, (B, H, Tq, n)
    weights: Any = None  # their weights, (B, H, Tq, n)
    keys: Any = None  # their keys as int64, or -1, (B, H, Tq, n)


class Parts(NamedTuple):
    """The state of each row after each split of the keys, (splits, B, H, Tq, ...), in float32; None
    if there is one split, or if not needed.

    `outputs` is contiguous. It holds the undivided outputs, (splits, B, H, Tq, Dv), then the
    largest logits and the sums of powers, (splits, B, H, Tq) each.
    """

    outputs: Any = None
    moment: Any = None
    groups: Any = None  # (groups, splits, B, H, Tq)
    best: Any = None  # (..., TOP)
    where: Any = None  # (..., TOP), int32


@triton.jit
def beside_outputs(parts, rows, splits, DV: tl.constexpr):
    """Return the addresses of the largest logits and of the sums of powers in `Parts.outputs`."""
    count = splits.to(tl.int64) * rows
    return parts.outputs + count * DV, parts.outputs + count * (DV + 1)


@triton.jit
def store_parts(
    parts, state, sizes, splits, split, b, h, t, real,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    top, total, acc, moment, of_groups, best, where = state
    rows = sizes.B * sizes.H * sizes.Tq
    at = ((split * sizes.B + b).to(tl.int64) * sizes.H + h) * sizes.Tq + t
    d = tl.arange(0, BLOCK_DV)
    tl.store(
        parts.outputs + at[:, None] * DV + d[None, :], acc, mask=real[:, None] & (d[None, :] < DV)
    )
    tops, totals = beside_outputs(parts, rows, splits, DV)
    tl.store(tops + at, top, mask=real)
    tl.store(totals + at, total, mask=real)
    if parts.moment is not None:
        tl.store(parts.moment + at, moment, mask=real)
    if parts.groups is not None:
        for i in tl.static_range(len(of_groups)):
            tl.store(parts.groups + splits.to(tl.int64) * rows * i + at, of_groups[i], mask=real)
    if parts.best is not None:
        at = at[:, None] * TOP + tl.arange(0, TOP)[None, :]
        tl.store(parts.best + at, best, mask=real[:, None])
        tl.store(parts.where + at, where, mask=real[:, None])


@triton.jit(do_not_specialize=["splits", "n"])
def merge_splits(
    out, results, parts, rule, sizes, splits, n,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row, and finish it. This reads splits x (Dv + 2) numbers, a few
    thousandths of what the splits read, and what statistics need."""
    row = tl.program_id(0)
    rows = sizes.B * sizes.H * sizes.Tq
    split, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    valid = split < splits
    at = split.to(tl.int64) * rows + row
    tops, totals = beside_outputs(parts, rows, splits, DV)
    tops = tl.load(tops + at, mask=valid, other=float("-inf"))
    totals = tl.load(totals + at, mask=valid, other=0.0)
    top = tl.max(tops, 0)
    shift = (tops - anchor(top)) * rule.unit
    factors = tl.exp2(shift)
    one = tl.zeros([1], tl.float32)  # `finish` expects a tensor of rows; here it has one
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    if out is not None:
        inside = valid[:, None] & (d[None, :] < DV)
        of_values = tl.load(parts.outputs + at[:, None] * DV + d[None, :], mask=inside, other=0.0)
        acc = tl.sum(of_values * factors[:, None], 0)[None, :]
    moment = one
    if parts.moment is not None:
        moments = tl.load(parts.moment + at, mask=valid, other=0.0)
        below = tl.maximum(shift, -1000.0)  # as in `take`
        moment = one + tl.sum(factors * (moments + below * totals), 0)
    of_groups = ()
    for i in tl.static_range(GROUPS):
        of_group = parts.groups + splits.to(tl.int64) * rows * i + at
        sums = tl.load(of_group, mask=valid, other=0.0)
        of_groups += (one + tl.sum(sums * factors, 0),)  # type: ignore[assignment]
    candidate = tl.arange(0, SPLITS * TOP)
    of_split = candidate // TOP
    best = tl.full([1, SPLITS * TOP], float("-inf"), tl.float32)
    where = tl.full([1, SPLITS * TOP], -1, tl.int32)
    if parts.best is not None:
        at = ((of_split.to(tl.int64) * rows + row) * TOP + candidate % TOP)[None, :]
        best = tl.load(parts.best + at, mask=(of_split < splits)[None, :], other=float("-inf"))
        where = tl.load(parts.where + at, mask=(of_split < splits)[None, :], other=-1)
    state = (top + one, tl.sum(totals * factors, 0) + one, acc, moment, of_groups, best, where)
    rows_here = row + tl.zeros([1], tl.int32)
    head = rows_here // sizes.Tq
    finish(
        out, results, state, rule, sizes, n, head // sizes.H, head % sizes.H, rows_here % sizes.Tq,
        rows_here >= 0, DV, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def finish(
    out, results, state, rule, sizes, n, b, h, t, real,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add the sink, divide, and store. The output of a fully masked row is 0."""
    top, total, acc, moment, of_groups, best, where = state
    after = top
    if rule.sinks is not None:
        sink = tl.load(rule.sinks + h)
        after = tl.maximum(top, sink)
    base = anchor(after)
    factor = tl.exp2((top - base) * rule.unit)
    complete = total * factor
    if rule.sinks is not None:
        complete = complete + tl.exp2((sink - base) * rule.unit)
    empty = complete == 0.0
    share = factor / tl.where(empty, 1.0, complete)
    # A fully masked row has no weights, even if the sink is NaN.
    of_weights = tl.where(empty | (top == float("-inf")), 0.0, share)
    if out is not None:
        store_rows(out, b, h, t, acc * of_weights[:, None], real, DV, BLOCK_DV)
    at = (b.to(tl.int64) * sizes.H + h) * sizes.Tq + t
    largest = tl.where(total != total, total, top)
    if results.top is not None:
        tl.store(results.top + at, anchor(largest), mask=real)
    if results.largest is not None:
        tl.store(results.largest + at, largest * rule.natural, mask=real)
    if results.sum is not None:
        tl.store(results.sum + at, total, mask=real)
    if results.share is not None:
        tl.store(results.share + at, of_weights, mask=real)
    if results.lse is not None:
        lse = base * rule.natural + tl.log2(tl.where(empty, 1.0, complete)) * 0.6931471805599453
        tl.store(results.lse + at, tl.where(empty, float("-inf"), lse), mask=real)
    if results.moment is not None:
        tl.store(results.moment + at, moment * 0.6931471805599453, mask=real)
    if results.entropy is not None:
        # With powers p and w = p s:  -sum of w log w = s (-log s sum of p - sum of p (x - top)).
        gap = -tl.log2(tl.where(share == 0.0, 1.0, share))
        entropy = share * (gap * total - moment) * 0.6931471805599453
        # By rounding it may be -1e-8, and for one key it is -0.
        tl.store(results.entropy + at, tl.where(entropy <= 0.0, 0.0, entropy), mask=real)
    for i in tl.static_range(len(of_groups)):
        of_group = ((b + i * sizes.B).to(tl.int64) * sizes.H + h) * sizes.Tq + t
        if results.groups is not None:
            tl.store(results.groups + of_group, of_groups[i], mask=real)
        if results.masses is not None:
            tl.store(results.masses + of_group, of_groups[i] * share, mask=real)
    if results.keys is not None:
        store_largest(results, rule, best, where, anchor(top), share, at, n, real)


@triton.jit
def store_largest(results, rule, best, where, base, share, at, n, real):
    """Store the n largest of each row in falling order, the lower key first among equal logits."""
    for i in range(0, n):
        score = tl.max(best, 1)
        key = tl.min(tl.where(best == score[:, None], where, 2147483647), 1)
        taken = where == key[:, None]
        best = tl.where(taken, float("-inf"), best)
        where = tl.where(taken, -1, where)
        column = at * n + i
        tl.store(results.keys + column, tl.maximum(key, -1).to(tl.int64), mask=real)
        if results.scores is not None:
            tl.store(results.scores + column, score * rule.natural, mask=real)
        if results.weights is not None:
            power = tl.where(key < 0, 0.0, tl.exp2((score - base) * rule.unit))
            tl.store(results.weights + column, power * share, mask=real)
