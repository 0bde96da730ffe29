"""Compute statistics by the Triton kernels: of rows in the forward sweep, sums of weights in a
second one. The results stay on the device, as accumulators of `problem/online_softmax.py`. They are
finished and merged like those of any other `Partial`."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from ....masks.key_group import KeyGroup
from ....problem.online_softmax import Accumulator, State, WeightedSum, anchor, moved
from ....problem.problem import Inputs, Problem
from ....problem.tiles import runs_of
from ....stats import Partial, Statistic, exact_rows, pooled, topk
from ....stats.group_statistics import GroupStatistic
from ....stats.row_statistics import Moment
from ....stats.statistic import WeightSums, bin_of, empty_rows, empty_sums, finish_rows
from ....stats.top_scores import TopScores
from ....torch_state import is_plain
from ...operators import in_kernels, with_rows
from ..replay import on_device
from .arguments import FAR, Cells, args_of, cells, cells_if, kernel_rule, rows, sizes_of
from .forward import ABSENT, Group, Grouped, Ids, PerKey, Ranges
from .launch_backward import seen_from
from .launch_forward import attend, dot_precision, head_block, power_of_2
from .start import start
from .weight_sums import store_exact_rows, sum_weights

LN2 = math.log(2.0)
MOST_TOP = 64  # the most weights of a row for `topk` that fit into registers


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


def answer_and_stats(
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], with_out: bool
) -> tuple[Tensor | None, Partial]:
    """Compute the statistics of all queries over all keys, and with `with_out` the output in the
    same sweep. Without it the values are not read."""
    rule = args_of(p)
    natural = kernel_rule(rule).natural
    empty = empty_rows(p, statistics, p.Tq)
    top = cast("TopScores | None", empty.more.get("top"))
    per_key = _per_key(p, statistics, natural)
    wanted = {"max", "sum"}
    wanted |= {"moment"} if "moment" in empty.more else set()
    wanted |= {"groups"} if per_key.grouped else set()
    wanted |= {"best", "where"} if top is not None else set()
    out, sums_of_splits, _ = attend(
        inputs.q, inputs.k, inputs.v if with_out else None, rule, frozenset(wanted), per_key,
        0 if top is None else max(top.keys.shape[-1], 1),
    )  # fmt: skip
    p = p.without_dropout
    state = _state(sums_of_splits, natural, empty)
    sums = None
    if any(s.sweep == "second" for s in statistics):
        share = finish_rows(state, p.sinks).factor
        # In units of the rule, as the logits of the kernel.
        top_of_rows = sums_of_splits["max"].amax(0)
        sums = _sum_weights(p, inputs, statistics, top_of_rows, share)
    return out, Partial.of_all(p, statistics, state, sums)


def _state(computed: dict[str, Tensor], natural: float, empty: State) -> State:
    """Merge the sums of the splits, (splits, ...) each, and convert them to nats."""
    more: dict[str, Accumulator] = {}
    if "moment" in empty.more:
        more["moment"] = Moment(computed["moment"] * LN2)
    first = 0
    for name, x in empty.more.items():
        if isinstance(x, WeightedSum):  # in the order of `_per_key`
            sums = computed["groups"][first : first + x.total.shape[-1]]
            more[name] = WeightedSum(sums.movedim(0, -1))
            first += len(sums)
    splits = State(computed["max"] * natural, computed["sum"], more)
    if len(splits.max) == 1:
        summed = splits.map(lambda x: x[0])
    else:  # all splits at once; `merge` would merge them pair by pair
        summed = moved(splits, anchor(splits.max.amax(0))).map(lambda x: x.sum(0))
        summed = summed._replace(max=splits.max.amax(0))
    more = dict(summed.more)
    if "top" in empty.more:  # the kernel does not sort it
        best, where = (computed[name].movedim(0, -2).flatten(-2) for name in ("best", "where"))
        unsorted = TopScores(best * natural, where.long())
        more["top"] = cast(TopScores, empty.more["top"]).merged(unsorted)
    return State(summed.max, summed.sum, more)


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
    p: Problem, inputs: Inputs, statistics: tuple[Statistic, ...], top: Tensor, share: Tensor
) -> WeightSums:
    q, k = with_rows(inputs.q), with_rows(inputs.k)
    rule, sizes = args_of(p), sizes_of(q, k)
    sums = empty_sums(p, statistics, slice(0, p.Tq), p.Tk)
    if not top.numel() or not p.Tk:
        return sums
    block_d = head_block(p.D)
    maps = [s for s in statistics if isinstance(s, pooled)]
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
    share = share.contiguous()
    with on_device(q):
        if "received" in sums or maps:
            # The most bins, of at least Tk // k_bins keys each, that N keys can overlap.
            slots = -(-(N - 1) // (p.Tk // k_bins)) + 1
            parts = None
            if maps:
                parts = q.new_empty((p.B, p.H, q_bins, tiles, slots), dtype=torch.float32)
            start(
                sum_weights, tiles * p.H * p.B, q.get_device(),
                rows(q), rows(k), top, share, sums.get("received"), parts, factors,
                cells_if(first), cells_if(last), of_kernel, sizes, tiles, q_bins, k_bins, slots,
                **how,
            )  # fmt: skip
            if parts is not None:
                sums["pooled"] = _pooled(parts, p.Tk, k_bins, N)
        requested = [
            i for s in statistics if isinstance(s, exact_rows) for i in s.positions(p.grid)
        ]
        if requested:
            positions = _positions(requested, p.device)
            strips = math.ceil(len(requested) / M)
            start(
                store_exact_rows, tiles * strips * p.H * p.B, q.get_device(),
                rows(q), rows(k), top, share, positions, sums["exact_rows"], of_kernel, sizes,
                tiles, len(requested), **how,
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


def _pooled(pooled: Tensor, Tk: int, k_bins: int, N: int) -> Tensor:
    """Sum the slots of tiles of N keys, (B, H, q_bins, tiles, slots), into bins of keys. Each bin
    gathers its slots and adds them in order, so that NaN stays in its bin."""
    tiles, slots = pooled.shape[-2:]
    device = pooled.device
    column = torch.arange(k_bins, device=device)
    start, stop = column * Tk // k_bins, (column + 1) * Tk // k_bins
    widest = int(-(-Tk // k_bins) // N) + 2
    tile = (start // N).unsqueeze(-1) + torch.arange(widest, device=device)
    slot = column.unsqueeze(-1) - bin_of(tile * N, Tk, k_bins)
    inside = tile * N < stop.unsqueeze(-1)
    index = (tile.clamp(max=tiles - 1) * slots + slot.clamp(0, slots - 1)).flatten()
    parts = pooled.flatten(3)[..., index].unflatten(-1, (k_bins, widest))
    return parts.masked_fill(~inside, 0.0).sum(-1)
