"""Compute statistics by the Triton kernels: of rows in the forward sweep, sums of weights in a
second one.

`finished` returns finished statistics, which the kernels store. `accumulated` returns the
accumulators of `stats/` as a `Partial`, which merges with others. Nothing leaves the device. Each
sweep is a function of tensors and numbers alone, so later calls repeat its steps.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....masks.key_group import GroupMask
from ....problem.online_softmax import Accumulator, State, WeightedSum
from ....problem.problem import Inputs, Problem
from ....problem.tiles import runs_of
from ....stats import Partial, Result, Statistic, Statistics, exact_rows, pooled, received, topk
from ....stats.group_statistics import GroupStatistic
from ....stats.row_statistics import Entropy, Moment
from ....stats.statistic import TopWeights, WeightStatistic, WeightSums, empty_sums
from ....stats.top_scores import TopScores
from ....torch_state import is_plain
from ...operators import KernelArgs, in_kernels
from ..replay import on_device, replayed
from .arguments import (
    FAR,
    Cells,
    Sizes,
    args_of,
    cells,
    cells_if,
    kernel_rule,
    readable,
    rows,
    sizes_of,
)
from .forward import ABSENT, Group, Grouped, Ids, PerKey, Ranges
from .launch_backward import seen_from
from .launch_forward import attend, dot_precision, head_block, power_of_2
from .start import start
from .weight_sums import pool_parts, store_exact_rows, sum_weights

MOST_TOP = 64  # the most weights of a row for `topk` that fit into registers
# The members of `RowResults` from which each statistic follows, finished and as an accumulator.
FINISHED = {
    "lse": ["lse"], "max": ["largest"], "entropy": ["entropy"], "effective": ["entropy"],
    "topk": ["weights", "keys"], "mass": ["masses"], "weighted": ["masses"],
    "value_weighted": ["groups"], "received": ["top", "share"], "pooled": ["top", "share"],
    "exact_rows": ["top", "share"],
}  # fmt: skip
ACCUMULATED = {
    "entropy": ["moment"], "effective": ["moment"], "topk": ["scores", "keys"], "mass": ["groups"],
    "weighted": ["groups"], "value_weighted": ["groups"], "received": ["top", "share"],
    "pooled": ["top", "share"], "exact_rows": ["top", "share"],
}  # fmt: skip


def can_count(p: Problem, inputs: Inputs, statistics: Statistics) -> bool:
    """Return whether the kernels can compute these statistics. They cannot with gradients, and not
    under a tracer or a transform."""
    plain = is_plain(*inputs, p.sinks, None if p.bias is None else p.bias.numbers)
    supported = all(in_kernels(s) and _fits(s, p) for s in statistics)
    return plain and not p.records_grad and supported


def _fits(statistic: Statistic, p: Problem) -> bool:
    if isinstance(statistic, GroupStatistic):  # the kernels read groups without bits
        groups = statistic.key_groups(p)
        return all(x.band is not None or x.ranges.bits is None for x in groups)
    return not isinstance(statistic, topk) or min(statistic.n, p.Tk) <= MOST_TOP


def finished(
    p: Problem, inputs: Inputs, statistics: Statistics, with_out: bool
) -> tuple[Tensor | None, dict[str, Result]]:
    """Compute finished statistics of all queries over all keys, and with `with_out` the output in
    the same sweep. Without it the values are not read."""
    wanted = {name for s in statistics for name in FINISHED[s.name]}
    out, of_rows = _sweep(p, inputs, statistics, with_out, wanted)
    p = p.without_dropout
    sums = _sum_weights(p, inputs, statistics, of_rows, mean=True)
    groups = _groups_of(statistics, of_rows, FINISHED)
    return out, {s.name: _finished(s, p, of_rows, groups, sums) for s in statistics}


def _finished(
    s: Statistic, p: Problem, of_rows: dict[str, Tensor], groups: dict[str, Tensor],
    sums: WeightSums,
) -> Result:  # fmt: skip
    if isinstance(s, GroupStatistic):
        return s.of_sums(groups[s.accumulator].unbind(-1))
    if isinstance(s, Entropy):
        return s.of_entropy(of_rows["entropy"])
    if isinstance(s, topk):
        return TopWeights(of_rows["weights"], of_rows["keys"])
    if isinstance(s, WeightStatistic):
        total = sums[s.name]
        return total if isinstance(s, pooled) else s.finish(total, p.grid, None)
    return of_rows[FINISHED[s.name][0]]


def accumulated(p: Problem, inputs: Inputs, statistics: Statistics) -> Partial:
    """Compute the accumulators of all queries over all keys, without the output."""
    wanted = {name for s in statistics for name in ACCUMULATED.get(s.name, [])}
    _, of_rows = _sweep(p, inputs, statistics, False, wanted | {"largest", "sum"})
    groups = _groups_of(statistics, of_rows, ACCUMULATED)
    more: dict[str, Accumulator] = {name: WeightedSum(x) for name, x in groups.items()}
    if "moment" in of_rows:
        more["moment"] = Moment(of_rows["moment"])
    if "keys" in of_rows:
        more["top"] = TopScores(of_rows["scores"], of_rows["keys"])
    state = State(of_rows["largest"], of_rows["sum"], more)
    sums = None
    if any(s.sweep == "second" for s in statistics):
        sums = _sum_weights(p, inputs, statistics, of_rows, mean=False)
    return Partial.of_all(p, statistics, state, sums)


_attend = replayed(attend)


def _sweep(
    p: Problem, inputs: Inputs, statistics: Statistics, with_out: bool, wanted: set[str]
) -> tuple[Tensor | None, dict[str, Tensor]]:
    rule = args_of(p)
    per_key = _per_key(p, statistics, kernel_rule(rule).natural)
    n = next((min(s.n, p.Tk) for s in statistics if isinstance(s, topk)), 0)
    v = inputs.v if with_out else None
    computed: tuple[Tensor | None, dict[str, Tensor]] = _attend(
        inputs.q, inputs.k, v, rule, frozenset(wanted), per_key, n
    )
    return computed


def _groups_of(
    statistics: Statistics, of_rows: dict[str, Tensor], members: dict[str, list[str]]
) -> dict[str, Tensor]:
    """Return the sums of each statistic over its groups, (B, H, Tq, groups), by accumulator."""
    groups, first = {}, 0
    for s in statistics:
        if isinstance(s, GroupStatistic):  # in the order of `_per_key`
            (member,) = members[s.name]
            sums = of_rows[member][first : first + len(s.masks)]
            groups[s.accumulator] = sums.movedim(0, -1)
            first += len(s.masks)
    return groups


def _per_key(p: Problem, statistics: Statistics, natural: float) -> PerKey:
    """Return what the kernel reads of each key for statistics."""
    grouped: list[Grouped] = []
    top_offsets: Cells | tuple[()] = ABSENT
    for s in statistics:
        numbers = _numbers(s, p)
        if isinstance(s, GroupStatistic):
            groups = tuple(_group(x.mask, p) for x in s.key_groups(p))
            grouped.append(Grouped(groups, ABSENT if numbers is None else cells(numbers)))
        elif isinstance(s, topk) and numbers is not None:
            top_offsets = cells(numbers.log() / natural)
    return PerKey(tuple(grouped), top_offsets)


def _group(of: GroupMask, p: Problem) -> Group:
    result = Group()
    if of.lo is not None and of.hi is not None:
        result = Group(ranges=Ranges(cells(of.lo), cells(of.hi), of.lo.shape[-1]))
    elif min(of.before, of.after) < p.Tq + p.Tk:  # otherwise it has all keys
        band = (4 * max(-FAR // 4, min(n, FAR // 4)) + 2 for n in of[:2])
        result = Group(band=tuple(band))
    if of.query_ids is not None and of.key_ids is not None:
        ids = Ids(cells(of.query_ids.unsqueeze(3)), cells(of.key_ids.unsqueeze(2)))
        result = result._replace(ids=ids)
    return result


def _numbers(statistic: Statistic, p: Problem) -> Tensor | None:
    """Return the numbers by which a statistic multiplies weights, (B, H, 1, Tk)."""
    return None if statistic.factors is None else statistic.factors.of(p).unsqueeze(2)


class Sums(NamedTuple):
    """What the second sweep sums: whether the weights that keys receive, the bins of a map, and
    whether it has means over the queries of a bin, and the queries of exact rows."""

    received: bool
    bins: tuple[int, int] | None
    mean: bool
    exact: tuple[int, ...] | None


def _sum_weights(
    p: Problem, inputs: Inputs, statistics: Statistics, of_rows: dict[str, Tensor],
    mean: bool
) -> WeightSums:  # fmt: skip
    """Sum weights over queries. With `mean`, a pooled map has means over the queries of a bin."""
    second = [s for s in statistics if isinstance(s, WeightStatistic)]
    if not second or not p.B * p.H * p.Tq * p.Tk:
        return empty_sums(p, second, slice(0, p.Tq), p.Tk)
    of_map = next((s for s in second if isinstance(s, pooled)), None)
    exact = next((s for s in second if isinstance(s, exact_rows)), None)
    of = Sums(
        any(isinstance(s, received) for s in second),
        None if of_map is None else (of_map.query_bins(p), of_map.key_bins(p)),
        mean,
        None if exact is None else tuple(exact.positions(p.grid)),
    )
    rule, tile = args_of(p), _tile(p, of.bins[0] if of.bins else 1)
    seen = None
    if rule.lo is not None:  # not a step to be repeated, because the layers of a model share it
        seen = seen_from(rule, Sizes(p.B, p.H, p.G, p.Tq, p.Tk), *tile[:2])
    factors = None if of_map is None else _numbers(of_map, p)
    top, share = of_rows["top"], of_rows["share"]
    sums: WeightSums = _second_sweep(inputs.q, inputs.k, top, share, rule, factors, seen, tile, of)
    return sums


@replayed
def _second_sweep(
    q: Tensor, k: Tensor, top: Tensor, share: Tensor, rule: KernelArgs, factors: Tensor | None,
    seen: tuple[Tensor, Tensor] | None, tile: tuple[int, int, int], of: Sums,
) -> WeightSums:  # fmt: skip
    """Compute the sums `of` weights. `factors` multiply those of the map; `seen` are the queries
    that see each tile of keys, if the rule has ranges."""
    q, k = readable(q), readable(k)
    sizes = sizes_of(q, k)
    B, H, _, _, Tk = sizes
    M, N, stages = tile
    D, device = q.shape[3], q.get_device()
    tiles = math.ceil(Tk / N)
    of_kernel = kernel_rule(rule)._replace(careful=1)  # nothing repairs the sums
    how: dict[str, Any] = dict(
        D=D, BLOCK_D=head_block(D), M=M, N=N, BAND=rule.lo is None,
        PRECISION=dot_precision(q.dtype), stages=stages,
    )  # fmt: skip
    new, sums = partial(q.new_empty, dtype=torch.float32), {}
    with on_device(q):
        if of.received:
            sums["received"] = new(B, H, Tk)
        if of.bins or of.received:
            q_bins, k_bins = of.bins or (1, 1)
            # The most bins, of at least Tk // k_bins keys each, that N keys can overlap.
            slots = -(-(N - 1) // (Tk // k_bins)) + 1
            parts = new(B, H, q_bins, tiles, slots) if of.bins else None
            first, last = seen or (None, None)
            start(
                sum_weights, tiles * H * B, device,
                rows(q), rows(k), top, share, sums.get("received"), parts, cells_if(factors),
                cells_if(first), cells_if(last), of_kernel, sizes, tiles, q_bins, k_bins, slots,
                **how,
            )  # fmt: skip
            if parts is not None:
                sums["pooled"] = new(B, H, q_bins, k_bins)
                block = min(power_of_2(k_bins), 128)
                start(
                    pool_parts, math.ceil(k_bins / block) * q_bins * H * B, device,
                    parts, sums["pooled"], sizes, tiles, q_bins, k_bins, slots,
                    N=N, BLOCK=block, MEAN=of.mean,
                )  # fmt: skip
        if of.exact is not None:
            sums["exact_rows"] = new(B, H, len(of.exact), Tk)
        if of.exact:
            strips = math.ceil(len(of.exact) / M)
            start(
                store_exact_rows, tiles * strips * H * B, device,
                rows(q), rows(k), top, share, _positions(of.exact, q.device), sums["exact_rows"],
                of_kernel, sizes, tiles, len(of.exact), **how,
            )  # fmt: skip
    return sums


def _positions(positions: tuple[int, ...], device: torch.device) -> Tensor:
    """Return positions as a tensor, created on the device from their runs. A copy from the host
    would block, and cannot be captured in a CUDA graph."""
    runs = runs_of(positions)
    return torch.cat(
        [torch.arange(r.start, r.stop, dtype=torch.int32, device=device) for r in runs]
    )


def _tile(p: Problem, q_bins: int) -> tuple[int, int, int]:
    """Return the queries and keys of a tile, and its stages. More queries than a bin has would be
    idle. In float32, three tiles of 256 features do not fit into 99 KB of shared memory."""
    single, large = p.dtype == torch.float32, head_block(p.D) > 128
    most = 32 if single or large else 64
    queries = min(most, max(16, power_of_2(p.Tq // q_bins)))
    return queries, most, 2 if single and large else 3
