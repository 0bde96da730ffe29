"""Compute statistics by the Triton kernels: of rows in the forward sweep, sums of weights in a
second one.

`answer_and_results` returns finished statistics, which the kernels store. `answer_and_stats`
returns the accumulators of `stats/` as a `Partial`, which merges with others. Nothing leaves the
device.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....masks.key_group import KeyGroup
from ....problem.online_softmax import Accumulator, State, WeightedSum
from ....problem.problem import Inputs, Problem
from ....problem.tiles import runs_of
from ....stats import Partial, Result, Statistic, exact_rows, pooled, received, topk
from ....stats.group_statistics import GroupStatistic
from ....stats.row_statistics import Entropy, Moment
from ....stats.statistic import WeightStatistic, WeightSums, empty_sums
from ....stats.top_scores import TopScores
from ....torch_state import is_plain
from ...operators import in_kernels, with_rows
from ..replay import on_device
from .arguments import FAR, Cells, args_of, cells, cells_if, kernel_rule, rows, sizes_of
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


def can_count(p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...]) -> bool:
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


def answer_and_results(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], with_out: bool
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
        return s.of_sums(groups[s.accumulator])
    if isinstance(s, Entropy):
        return s.of_entropy(of_rows["entropy"])
    if isinstance(s, topk):
        return s.padded(of_rows["weights"], of_rows["keys"])
    if isinstance(s, WeightStatistic):
        total = sums[s.name]
        return total if isinstance(s, pooled) else s.finish(total, p.grid, None)
    return of_rows[FINISHED[s.name][0]]


def answer_and_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], with_out: bool
) -> tuple[Tensor | None, Partial]:
    """Compute as `answer_and_results`, but return accumulators."""
    wanted = {name for s in statistics for name in ACCUMULATED.get(s.name, [])}
    out, of_rows = _sweep(p, inputs, statistics, with_out, wanted | {"largest", "sum"})
    p = p.without_dropout
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
    return out, Partial.of_all(p, statistics, state, sums)


def _sweep(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], with_out: bool, wanted: set[str]
) -> tuple[Tensor | None, dict[str, Tensor]]:
    rule = args_of(p)
    per_key = _per_key(p, statistics, kernel_rule(rule).natural)
    n = next((min(s.n, p.Tk) for s in statistics if isinstance(s, topk)), 0)
    v = inputs.v if with_out else None
    return attend(inputs.q, inputs.k, v, rule, frozenset(wanted), per_key, n)


def _groups_of(
    statistics: tuple[Statistic, ...],
    of_rows: dict[str, Tensor],
    members: dict[str, list[str]],
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


def _per_key(p: Problem, statistics: tuple[Statistic, ...], natural: float) -> PerKey:
    """Return what the kernel reads of each key for statistics."""
    grouped: list[Grouped] = []
    top_offsets: Cells | tuple[()] = ABSENT
    for s in statistics:
        numbers = _numbers(s, p)
        if isinstance(s, GroupStatistic):
            groups = tuple(_group(x, p) for x in s.key_groups(p))
            grouped.append(Grouped(groups, ABSENT if numbers is None else cells(numbers)))
        elif isinstance(s, topk) and numbers is not None:
            top_offsets = cells(numbers.log() / natural)
    return PerKey(tuple(grouped), top_offsets)


def _group(group: KeyGroup, p: Problem) -> Group:
    result, band = Group(), group.band
    if band is None:
        lo, hi = group.ranges.lo, group.ranges.hi
        result = Group(ranges=Ranges(cells(lo), cells(hi), lo.shape[-1]))
    elif min(band) < p.Tq + p.Tk:  # otherwise it has all keys
        result = Group(band=tuple(4 * max(-FAR // 4, min(n, FAR // 4)) + 2 for n in band))
    of_query, of_key = group.numbered_ids
    if of_query is not None and of_key is not None:
        result = result._replace(ids=Ids(cells(of_query.unsqueeze(3)), cells(of_key.unsqueeze(2))))
    return result


def _numbers(statistic: Statistic, p: Problem) -> Tensor | None:
    """Return the numbers by which a statistic multiplies weights, (B, H, 1, Tk)."""
    return None if statistic.factors is None else statistic.factors.of(p).unsqueeze(2)


def _sum_weights(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], of_rows: dict[str, Tensor],
    mean: bool,
) -> WeightSums:  # fmt: skip
    """Sum weights over queries. With `mean`, a pooled map has means over the queries of a bin."""
    second = [s for s in statistics if isinstance(s, WeightStatistic)]
    if not second or not p.B * p.H * p.Tq * p.Tk:
        return empty_sums(p, second, slice(0, p.Tq), p.Tk)
    q, k = with_rows(inputs.q), with_rows(inputs.k)
    top, share = of_rows["top"], of_rows["share"]
    rule, sizes = args_of(p), sizes_of(q, k)
    block_d = head_block(p.D)
    maps = [s for s in second if isinstance(s, pooled)]
    q_bins, k_bins = (maps[0].query_bins(p), maps[0].key_bins(p)) if maps else (1, 1)
    factors = cells_if(_numbers(maps[0], p)) if maps else None
    M, N, stages = _tile(p, block_d, q_bins)
    tiles = math.ceil(p.Tk / N)
    first, last = (None, None) if rule.lo is None else seen_from(rule, sizes, M, N)
    how: dict[str, Any] = dict(
        D=p.D, BLOCK_D=block_d, M=M, N=N, BAND=rule.lo is None, PRECISION=dot_precision(p.dtype),
        stages=stages,
    )  # fmt: skip
    of_kernel = kernel_rule(rule)
    new, sums = partial(q.new_empty, dtype=torch.float32), {}
    with on_device(q):
        if any(isinstance(s, received) for s in second):
            sums["received"] = new(p.B, p.H, p.Tk)
        if maps or sums:
            # The most bins, of at least Tk // k_bins keys each, that N keys can overlap.
            slots = -(-(N - 1) // (p.Tk // k_bins)) + 1
            parts = new(p.B, p.H, q_bins, tiles, slots) if maps else None
            start(
                sum_weights, tiles * p.H * p.B, q.get_device(),
                rows(q), rows(k), top, share, sums.get("received"), parts, factors,
                cells_if(first), cells_if(last), of_kernel, sizes, tiles, q_bins, k_bins, slots,
                **how,
            )  # fmt: skip
            if parts is not None:
                sums["pooled"] = new(p.B, p.H, q_bins, k_bins)
                block = min(power_of_2(k_bins), 128)
                start(
                    pool_parts, math.ceil(k_bins / block) * q_bins * p.H * p.B, q.get_device(),
                    parts, sums["pooled"], sizes, tiles, q_bins, k_bins, slots,
                    N=N, BLOCK=block, MEAN=mean,
                )  # fmt: skip
        exact = [s for s in second if isinstance(s, exact_rows)]
        requested = [i for s in exact for i in s.positions(p.grid)]
        if exact:
            sums["exact_rows"] = new(p.B, p.H, len(requested), p.Tk)
        if requested:
            strips = math.ceil(len(requested) / M)
            start(
                store_exact_rows, tiles * strips * p.H * p.B, q.get_device(),
                rows(q), rows(k), top, share, _positions(requested, p.device), sums["exact_rows"],
                of_kernel, sizes, tiles, len(requested), **how,
            )  # fmt: skip
    return sums


def _positions(positions: list[int], device: torch.device) -> Tensor:
    """Return positions as a tensor, created on the device from their runs. A copy from the host
    would block, and cannot be captured in a CUDA graph."""
    runs = runs_of(positions)
    return torch.cat(
        [torch.arange(r.start, r.stop, dtype=torch.int32, device=device) for r in runs]
    )


def _tile(p: Problem, block_d: int, q_bins: int) -> tuple[int, int, int]:
    """Return the queries and keys of a tile, and its stages. More queries than a bin has would be
    idle. In float32, three tiles of 256 features do not fit into 99 KB of shared memory."""
    single, large = p.dtype == torch.float32, block_d > 128
    most = 32 if single or large else 64
    queries = min(most, max(16, power_of_2(p.Tq // q_bins)))
    return queries, most, 2 if single and large else 3
