"""Compute statistics of attention weights over ranks, equal to those on one machine.

Keys are sent around the ring as in `attention`. The sums of the first sweep are merged over the
keys of all ranks, from which weights follow. A second sweep sums weights over queries. What a key
receives is sent to the rank that holds the key. Pooled maps and exact rows are summed on all ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..core.engines.choice import compute_stats
from ..core.errors import BadValue
from ..core.functional.eager import eagerly
from ..core.functional.look import Look
from ..core.masks import Grid, Mask, dense
from ..core.problem.biases import Bias
from ..core.problem.check import Options, make_problem
from ..core.problem.problem import Inputs, Problem
from ..core.stats import (
    DEFAULT_STATISTICS,
    Partial,
    Result,
    Statistic,
    Statistics,
    exact_rows,
    map_tensors,
    parse_stats,
    pooled,
    sweep,
    topk,
)
from ..core.stats.parse import must_fit
from ..core.stats.statistic import bin_of
from ..core.stats.top_scores import TopScores
from .attention import TIMEOUT, Call, agreed_ring, gathered, output
from .cut import Cut
from .handshake import agree, reporting_errors
from .layouts import Layout, Positions
from .ring import Block, Part, PendingPart, Ring, pieces
from .transport import Group, GroupTransport, Transport

MERGED = "received", "pooled", "exact_rows"  # what `_SecondSweep` sums


@eagerly
def look(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stats: Iterable[str | Statistic] = DEFAULT_STATISTICS,
    group: Group = None,
    layout: Layout | str | None = None,
    key_layout: Layout | str | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    gather: bool = False,
    timeout: float = TIMEOUT,
) -> Look:
    """Compute the output of `distributed.attention`, and exact statistics of its weights.

    Args:
        stats: as in `clearhead.look`. Queries and keys are positions of the whole sequence, also in
            groups of keys. Numbers per key (`by`) are those of all keys, the same on every rank.
        gather: whether every rank gets the statistics of all positions instead of its own.
        q, k, v and the other arguments: as in `distributed.attention`.

    Returns:
        A `Look` with `.out` of this rank's queries, and one attribute for each statistic, without
        gradients. Without `gather` they are of this rank's queries too, and "received" is of its
        keys, (B, H, k); `unshard` with dim=2 gathers them. `pooled` and `exact_rows` are complete
        on every rank.

    Raises what `distributed.attention` raises, and `BadValue` for unknown statistics.
    """
    transport = GroupTransport(group, timeout)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    return look_over_ranks(transport, Call(options, layout, key_layout), q, k, v, stats, gather)


def look_over_ranks(
    transport: Transport, call: Call, q: Tensor, k: Tensor, v: Tensor,
    stats: Iterable[str | Statistic], gather: bool = False,
) -> Look:  # fmt: skip
    """Compute `look` over any transport."""
    with reporting_errors(transport):
        statistics = parse_stats(stats)
        must_merge_over_ranks(statistics)
    ring, inputs = agreed_ring(transport, call, q, k, v, stats=statistics, gather=gather)
    statistics = parse_stats(statistics, ring.routes.grid)
    must_fit(statistics, ring.routes.grid)
    with transport.computing():
        out = output(ring, inputs)
        results = shard_statistics(ring, inputs, statistics)
        return Look(
            ring.problem, out, gather_statistics(ring, statistics, results) if gather else results
        )


def must_merge_over_ranks(statistics: Statistics) -> None:
    """Raise `BadValue` for statistics that cannot be merged over ranks."""
    for s in statistics:
        if s.own_pass or (s.sweep == "second" and s.name not in MERGED):
            rule = 'ranks merge only three sums of weights: "received", pooled and exact_rows.'
            hint = "request it on one machine."
            raise BadValue(f"The statistic {s.name} was requested over ranks.", rule, hint)


@torch.no_grad()
def shard_statistics(ring: Ring, inputs: Inputs, statistics: Statistics) -> dict[str, Result]:
    """Compute the statistics of this rank's queries and keys; `pooled` and `exact_rows` are
    complete."""
    if not statistics:
        return {}
    first = tuple(s for s in statistics if s.sweep == "first")
    parts: dict[Positions, Partial] = {}
    for at, part in _of_blocks(ring, inputs, first or parse_stats(["lse"])):
        parts[at] = parts[at].merge(part) if at in parts else part
    complete = [replace(p, problem=replace(p.problem, Tk=len(p.keys))) for p in parts.values()]
    of_queries = [p.finish() for p in complete]
    results = {
        s.name: tree_map(lambda *x: torch.cat(x, 2), *(part[s.name] for part in of_queries))
        for s in first
    }
    if len(first) < len(statistics):
        lse = {at: part.lse for at, part in zip(parts, complete, strict=True)}
        results |= _SecondSweep(ring, inputs, lse, statistics).run()
    return {s.name: results[s.name] for s in statistics}


def gather_statistics(
    ring: Ring, statistics: Statistics, results: dict[str, Result]
) -> dict[str, Result]:
    """Gather the statistics of all positions on every rank."""
    layouts = {"queries": ring.routes.queries, "keys": ring.routes.keys}

    def of_all(s: Statistic) -> Result:
        if (layout := layouts.get(s.axis)) is None:
            return results[s.name]  # complete on every rank
        return map_tensors(results[s.name], lambda x: gathered(ring.transport, x, layout, 2))

    return {s.name: of_all(s) for s in statistics}


def _of_blocks(
    ring: Ring, inputs: Inputs, statistics: Statistics
) -> Iterator[tuple[Positions, Partial]]:
    """Run the first sweep: yield partial statistics of queries at some positions over some keys."""
    q, k, none = inputs.q, inputs.k, inputs.k[..., :0]
    for at, queries in pieces(ring.routes.queries.positions[ring.transport.rank], ring.by_range):
        of_none = Inputs(q[:, :, queries], k[:, :, :0], none[:, :, :0])
        problem, _ = make_problem(*of_none, Options(scale=ring.problem.scale))
        no_keys = Block(queries, slice(0, 0), problem, of_none, None, at, Positions(()))
        yield at, _partial(ring, no_keys, statistics)
    for owner, part in ring.parts(k, none):
        for block in ring.blocks(owner, q, part):
            yield block.at, _partial(ring, block, statistics)


def _partial(ring: Ring, block: Block, statistics: Statistics) -> Partial:
    grid, at, device = ring.routes.grid, block.at, block.problem.device
    cut = [_cut(s, grid, at, block.on) for s in statistics]
    part = compute_stats(block.problem, block.inputs, cut)
    assert part.rows is not None
    rows, keys = part.rows, block.on.tensor(device)
    for s in statistics:
        if isinstance(s, topk):
            top = TopScores(*rows.more["top"]).at(keys, min(s.n, grid.Tk))
            rows = rows._replace(more={**rows.more, "top": top})
    every_key = replace(ring.problem, Tq=len(at))
    return Partial(every_key, statistics, at.tensor(device), keys, rows, None)


def _cut(statistic: Statistic, grid: Grid, at: Positions, on: Positions) -> Statistic:
    """Restrict a statistic to a block, whose groups and numbers of keys are at absolute
    positions."""
    cut = statistic.with_masks(lambda mask: Cut(mask, grid, at, on))
    return cut if cut.by is None else cut.with_numbers(_numbers(cut, on))


def _numbers(statistic: Statistic, on: Positions) -> Tensor:
    """Return the numbers that multiply the weights of the keys at some positions, (B|1, H|1, k)."""
    assert statistic.factors is not None and statistic.factors.numbers is not None
    return on.cut(statistic.factors.numbers, 2)


@torch.no_grad()
def rows(
    transport: Transport, own: Positions, problem: Problem, inputs: Inputs, queries: Tensor
) -> Tensor:
    """Compute the exact weights of few queries, (n,), on all keys: (B, H, n, Tk).

    Every rank gets the queries and computes them over its own keys, `own`. Two messages merge the
    results.
    """
    call: dict[str, object] = {"call": "rows of queries", "queries": queries}
    agree(transport, call, inputs.q.shape[2], inputs.k.shape[2])
    with transport.computing():
        p, on = problem, own.tensor(problem.device)
        is_own = torch.isin(queries, on)
        few = inputs.q.new_zeros(p.B, p.H, len(queries), p.D)
        few[:, :, is_own] = inputs.q[:, :, own.before(queries[is_own])]
        few = torch.stack(transport.all_gather(few)).sum(0)
        every, like = slice(0, p.Tk), few.new_empty((), dtype=p.wide)
        keep = p.key_ranges.to_bool(queries, every)[..., on]
        bias = None if p.bias is None else p.bias.block(p.grid, queries, every, like)[..., on]
        part, few_inputs = make_problem(
            *inputs._replace(q=few),
            Options(mask=dense(keep=keep), bias=bias, scale=p.scale, softcap=p.softcap),
        )
        rows = exact_rows(range(len(queries)))
        results = compute_stats(part, few_inputs, ["lse", rows]).finish()
        lse, weights = results["lse"], results["exact_rows"]
        assert isinstance(lse, Tensor) and isinstance(weights, Tensor)
        total = torch.stack(transport.all_gather(lse)).logsumexp(0)
        if p.sinks is not None:
            total = torch.logaddexp(total, p.sinks.to(total).unsqueeze(-1))
        of_rank = torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0)
        full = weights.new_zeros(p.B, p.H, len(queries), p.Tk)
        full[..., on] = weights * of_rank.unsqueeze(-1)
        return torch.stack(transport.all_gather(full)).sum(0)


class _SecondSweep:
    """Sums of weights, exp(x - lse), of strips of this rank's queries over all keys.

    A strip is inside one bin of a map, and each exact row is a strip by itself. So only the weight
    that each key receives from a strip is needed.
    """

    def __init__(
        self, ring: Ring, inputs: Inputs, lse: dict[Positions, Tensor], statistics: Statistics
    ) -> None:
        self.ring, self.inputs, self.lse = ring, inputs, lse
        self.statistics = {s.name: s for s in statistics}
        p, grid = ring.problem, ring.routes.grid
        of_map = next((s for s in statistics if isinstance(s, pooled)), pooled(1, 1))
        self.bins, self.key_bins = min(of_map.rows, grid.Tq), min(of_map.cols, grid.Tk)
        self.exact = [i for s in statistics if isinstance(s, exact_rows) for i in s.positions(grid)]
        like = torch.zeros((), dtype=p.wide, device=p.device)
        self.received = like.new_zeros(p.B, p.H, inputs.k.shape[2])
        self.map = like.new_zeros(p.B, p.H, self.bins, self.key_bins)
        self.rows = like.new_zeros(p.B, p.H, len(self.exact), grid.Tk)

    def run(self) -> dict[str, Result]:
        ring, rank, p = self.ring, self.ring.transport.rank, self.ring.problem
        returning: list[tuple[int, PendingPart]] = []
        for step, (owner, part) in enumerate(ring.parts(self.inputs.k, self.inputs.k[..., :0])):
            received = self.received.new_zeros(p.B, p.H, part.k.shape[2])
            for block in ring.blocks(owner, self.inputs.q, part):
                self.add(block, received)
            if "received" not in self.statistics:
                continue
            if step == 0:
                ring.add_to(rank, self.received, received)
                continue
            source = (rank + step) % ring.transport.world
            part, count = Part(received, received[:0]), len(ring.routes.sent[source])
            pending = PendingPart(ring.transport, owner, part, source, count)
            returning.append((source, pending))
        for source, pending in returning:
            ring.add_to(source, self.received, pending.wait().k)
        results: dict[str, Result] = {}
        if "received" in self.statistics:
            own = ring.routes.keys.positions[rank]
            results["received"] = self.times_numbers("received", self.received, own)
        if "pooled" in self.statistics:
            Tq = ring.routes.grid.Tq
            in_bin = bin_of(torch.arange(Tq), Tq, self.bins).bincount(minlength=self.bins)
            total = self.on_all_ranks(self.map)
            results["pooled"] = total / in_bin.clamp(min=1).to(total).unsqueeze(-1)
        if "exact_rows" in self.statistics:
            results["exact_rows"] = self.on_all_ranks(self.rows)
        return results

    def add(self, block: Block, received: Tensor) -> None:
        """Add the weights of a block to `received`, (B, H, k), of the keys of its part, to the map
        and to the exact rows."""
        on = block.on.tensor(received.device)
        into = bin_of(on, self.ring.routes.grid.Tk, self.key_bins)
        for queries, bin, exact in self.strips(block.at):
            lse = self.lse[block.at][:, :, queries]
            part = sweep(block.problem, block.inputs, ["received"], queries=queries, lse=lse)
            weights = part.finish()["received"]
            assert isinstance(weights, Tensor)
            received[:, :, block.keys] += weights
            if "pooled" in self.statistics:
                of_map = self.times_numbers("pooled", weights, block.on)
                self.map[:, :, bin].index_add_(2, into, of_map)
            for n in exact:
                self.rows[:, :, n, on] = weights

    def times_numbers(self, name: str, weights: Tensor, on: Positions) -> Tensor:
        """Multiply sums of weights, (B, H, k), by the numbers that a statistic has for the keys."""
        statistic = self.statistics[name]
        if statistic.by is None:
            return weights
        products = weights * _numbers(statistic, on).to(weights)
        return products.masked_fill(weights == 0, 0.0)

    def strips(self, at: Positions) -> Iterator[tuple[slice, int, list[int]]]:
        """Yield strips of queries, as indices into `at`, with their bin and the exact rows that
        they are."""
        positions = at.tensor()
        bins = bin_of(positions, self.ring.routes.grid.Tq, self.bins)
        alone = torch.isin(positions, torch.tensor(self.exact, dtype=torch.long))
        begins = (bins.diff() != 0) | alone[1:] | alone[:-1]
        ends = [0, *(begins.nonzero().flatten() + 1).tolist(), len(positions)]
        for start, stop in pairwise(ends):
            position = int(positions[start])
            exact = [n for n, i in enumerate(self.exact) if i == position]
            yield slice(start, stop), int(bins[start]), exact

    def on_all_ranks(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in order."""
        return torch.stack(self.ring.transport.all_gather(x)).sum(0)
