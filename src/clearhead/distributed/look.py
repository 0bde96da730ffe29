"""Statistics of attention weights whose sequence is cut over ranks: the numbers of one machine.

Keys travel round the ring as in `attention`. The sums of the first sweep merge over the keys of all
ranks; then a weight is known, and a second sweep adds up weights of some queries on every key: what
a key receives is sent back to the rank that holds it; a pooled map and exact rows, which belong to
no rank, are added up on all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..engines import compute_stats
from ..errors import BadValue
from ..functional.look import Look
from ..masks import Grid, Mask, dense
from ..problem.biases import Bias
from ..problem.check import Options, make_problem
from ..problem.problem import Inputs, Problem
from ..stats import (
    DEFAULT_STATISTICS,
    Partial,
    Result,
    Statistic,
    TopWeights,
    exact_rows,
    map_tensors,
    mass,
    parse_stats,
    pooled,
    sweep,
    topk,
)
from ..stats.parse import must_fit
from ..stats.statistic import bin_of
from ..stats.top_scores import TopScores
from .attention import TIMEOUT, Call, agreed, gathered, output
from .cut import Cut
from .handshake import agree, telling_others
from .layouts import Layout, Positions
from .ring import Block, Coming, Ring, pieces
from .transport import Group, GroupTransport, Transport

SHARED = "pooled", "exact_rows"  # of the matrix, not of a query or a key: whole on every rank


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
    """The output of `distributed.attention`, and exact statistics of its weights.

    Args:
        stats: what `clearhead.look` takes. Queries and keys are positions of the whole sequence,
            also those that groups of `mass` speak of.
        gather: whether every rank gets the statistics of all positions, not of its own alone.
        q, k, v and the other arguments: as in `distributed.attention`.

    Returns:
        A `Look`: `.out`, of this rank's queries, and one attribute for each statistic. Without
        `gather` they are of this rank's queries too, "received" of its keys, (B, H, k), and
        `unshard` gathers them, dim=2. `pooled` and `exact_rows` are whole on every rank. Statistics
        carry no gradient.

    Raises what `distributed.attention` raises, and `BadValue` for unknown statistics.
    """
    transport = GroupTransport(group, timeout)
    options = Options(mask, bias, scale, softcap, sinks, dropout, seed)
    return looked(transport, Call(options, layout, key_layout), q, k, v, stats, gather)


def looked(
    transport: Transport,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Iterable[str | Statistic],
    gather: bool = False,
) -> Look:
    with telling_others(transport):
        statistics = parse_stats(stats)
        must_be_counted(statistics)
    ring, inputs = agreed(transport, call, q, k, v, stats=statistics, gather=gather)
    statistics = parse_stats(statistics, ring.routes.grid)
    must_fit(statistics, ring.routes.grid)
    with transport.answering():
        out = output(ring, inputs)
        found = counted(ring, inputs, statistics)
        return Look(ring.problem, out, whole(ring, found) if gather else found)


def must_be_counted(statistics: tuple[Statistic, ...]) -> None:
    """Raises `BadValue` for statistics that ranks cannot count."""
    for s in statistics:
        if s.by is not None:
            raise BadValue(
                f"Statistics over ranks were asked for {s!r}.",
                "ranks do not multiply weights by numbers.",
                "ask for it on one machine, or without `by`.",
            )
        if s.sweep != "first" and s.name not in (*SHARED, "received"):
            raise BadValue(
                f"Statistics over ranks were asked for {s.name}.",
                'ranks add up only three sums of weights: "received", pooled and exact_rows.',
                "ask for it on one machine.",
            )


@torch.no_grad()
def counted(ring: Ring, inputs: Inputs, statistics: tuple[Statistic, ...]) -> dict[str, Result]:
    """Statistics of the queries and keys of this rank; `pooled` and `exact_rows` whole."""
    first = tuple(s for s in statistics if s.sweep == "first")
    parts: dict[Positions, Partial] = {}
    for at, part in _of_blocks(ring, inputs, first):
        parts[at] = parts[at].merge(part) if at in parts else part
    complete = [replace(p, problem=replace(p.problem, Tk=len(p.keys))) for p in parts.values()]
    of_queries = [p.finish() for p in complete]
    found = {s.name: _joined([part[s.name] for part in of_queries]) for s in first}
    if len(first) < len(statistics):
        lse = {at: part.lse for at, part in zip(parts, complete, strict=True)}
        found |= _SecondSweep(ring, inputs, lse, statistics).run()
    return {s.name: found[s.name] for s in statistics}


def whole(ring: Ring, found: dict[str, Result]) -> dict[str, Result]:
    """The statistics of all positions, on every rank, from those of the ranks."""

    def of_all(name: str, result: Result) -> Result:
        if name in SHARED:
            return result
        layout = ring.routes.keys if name == "received" else ring.routes.queries
        return map_tensors(result, lambda x: gathered(ring.transport, x, layout, 2))

    return {name: of_all(name, result) for name, result in found.items()}


def _of_blocks(
    ring: Ring, inputs: Inputs, statistics: tuple[Statistic, ...]
) -> Iterator[tuple[Positions, Partial]]:
    """The first sweep: for queries at some positions, what some of their keys tell."""
    p, grid = ring.problem, ring.routes.grid
    q, k, none = inputs.q, inputs.k, inputs.k[..., :0]
    nothing = Positions(())
    for at, queries in pieces(ring.routes.queries.held[ring.transport.rank], ring.by_range):
        no_keys = Inputs(q[:, :, queries], k[:, :, :0], none[:, :, :0])
        problem, _ = make_problem(*no_keys, Options(scale=p.scale))
        yield at, _partial(ring, problem, no_keys, statistics, grid, at, nothing)
    for owner, part in ring.parts(k, none):
        for block in ring.blocks(owner, q, part):
            at, on = block.at, block.on
            yield at, _partial(ring, block.problem, block.inputs, statistics, grid, at, on)


def _partial(
    ring: Ring,
    problem: Problem,
    inputs: Inputs,
    statistics: tuple[Statistic, ...],
    grid: Grid,
    at: Positions,
    on: Positions,
) -> Partial:
    cut = [_cut(s, grid, at, on) for s in statistics]
    part = compute_stats(problem, inputs, cut)
    assert part.rows is not None
    found, keys = part.rows, on.tensor(problem.device)
    for s in statistics:
        if isinstance(s, topk):
            top = TopScores(*found.more["top"]).at(keys, min(s.n, grid.Tk))
            found = found._replace(more={**found.more, "top": top})
    every_key = replace(ring.problem, Tq=len(at))
    return Partial(every_key, statistics, at.tensor(problem.device), keys, found, None)


def _cut(statistic: Statistic, grid: Grid, at: Positions, on: Positions) -> Statistic:
    """The same of a block; groups of keys stand at their absolute positions."""
    if not isinstance(statistic, mass):
        return statistic
    masks = zip(statistic.groups, statistic.masks, strict=True)
    return mass({name: Cut(mask, grid, at, on) for name, mask in masks})


@torch.no_grad()
def masses(
    transport: Transport,
    held: Positions,
    problem: Problem,
    inputs: Inputs,
    queries: Tensor,
    cells: dict[str, Tensor],
) -> dict[str, Tensor]:
    """The weight of few queries, (n,), on groups of keys `cells` (..., n, Tk): (B, H, n) each.

    The queries go to every rank, which answers them on its own keys; one message merges.
    """
    asked: dict[str, object] = {"call": "masses of groups", "queries": queries, "groups": cells}
    agree(transport, asked, inputs.q.shape[2], inputs.k.shape[2])
    with transport.answering():
        return _masses(transport, held, problem, inputs, queries, cells)


def _masses(
    transport: Transport,
    held: Positions,
    problem: Problem,
    inputs: Inputs,
    queries: Tensor,
    cells: dict[str, Tensor],
) -> dict[str, Tensor]:
    p, on = problem, held.tensor(problem.device)
    here = torch.isin(queries, on)
    few = inputs.q.new_zeros(p.B, p.H, len(queries), p.D)
    few[:, :, here] = inputs.q[:, :, held.before(queries[here])]
    few = torch.stack(transport.all_gather(few)).sum(0)
    every, like = slice(0, p.Tk), few.new_empty((), dtype=p.wide)
    keep = p.key_ranges.to_bool(queries, every)[..., on]
    bias = None if p.bias is None else p.bias.block(p.grid, queries, every, like)[..., on]
    part, few_inputs = make_problem(
        *inputs._replace(q=few),
        Options(mask=dense(keep=keep), bias=bias, scale=p.scale, softcap=p.softcap),
    )
    groups = mass({name: dense(keep=x[..., on]) for name, x in cells.items()})
    found = compute_stats(part, few_inputs, ["lse", groups]).finish()
    lse, shares = found["lse"], found["mass"]
    assert isinstance(lse, Tensor) and isinstance(shares, dict)
    packed = torch.stack([lse, *shares.values()])
    every_lse, *every_share = torch.stack(transport.all_gather(packed)).unbind(1)
    total = every_lse.logsumexp(0)
    if p.sinks is not None:
        total = torch.logaddexp(total, p.sinks.to(total).unsqueeze(-1))
    of_rank = torch.exp(every_lse - total).masked_fill(every_lse == -torch.inf, 0.0)
    return {name: (share * of_rank).sum(0) for name, share in zip(cells, every_share, strict=True)}


class _SecondSweep:
    """Adds up weights: exp(x - lse), of strips of the queries here on all keys.

    A strip lies in one bin of a map, and a row that is wanted exactly is a strip by itself; so all
    that is needed of a strip is what each key receives from it.
    """

    def __init__(
        self,
        ring: Ring,
        inputs: Inputs,
        lse: dict[Positions, Tensor],
        statistics: tuple[Statistic, ...],
    ) -> None:
        self.ring, self.inputs, self.lse = ring, inputs, lse
        self.names = [s.name for s in statistics]
        p, grid = ring.problem, ring.routes.grid
        maps = [
            (min(s.rows, grid.Tq), min(s.cols, grid.Tk))
            for s in statistics
            if isinstance(s, pooled)
        ]
        self.bins, self.key_bins = maps[0] if maps else (1, 1)
        self.exact = [i for s in statistics if isinstance(s, exact_rows) for i in s.places(grid)]
        nothing = torch.zeros(p.B, p.H, 0, dtype=p.wide, device=p.device)
        self.received = nothing.new_zeros(p.B, p.H, inputs.k.shape[2])
        self.map = nothing.new_zeros(p.B, p.H, self.bins, self.key_bins)
        self.rows = nothing.new_zeros(p.B, p.H, len(self.exact), grid.Tk)

    def run(self) -> dict[str, Result]:
        ring, here, p = self.ring, self.ring.transport.rank, self.ring.problem
        returning: list[tuple[int, Coming]] = []
        for step, (owner, part) in enumerate(ring.parts(self.inputs.k, self.inputs.k[..., :0])):
            given = self.received.new_zeros(p.B, p.H, part.k.shape[2])
            for block in ring.blocks(owner, self.inputs.q, part):
                self.add(block, given)
            if "received" not in self.names:
                continue
            if step == 0:
                ring.add_to(here, self.received, given)
                continue
            receiver = (here + step) % ring.transport.world
            shapes = (p.B, p.H, len(ring.routes.sent[receiver])), (0,)
            mail = [(owner, given.flatten())]
            returning.append((receiver, Coming(ring.transport, mail, receiver, shapes, given)))
        for receiver, coming in returning:
            ring.add_to(receiver, self.received, coming.wait().k)
        found: dict[str, Result] = {"received": self.received}
        if "pooled" in self.names:
            Tq = ring.routes.grid.Tq
            in_bin = bin_of(torch.arange(Tq), Tq, self.bins).bincount(minlength=self.bins)
            total = self.on_all_ranks(self.map)
            found["pooled"] = total / in_bin.clamp(min=1).to(total).unsqueeze(-1)
        if "exact_rows" in self.names:
            found["exact_rows"] = self.on_all_ranks(self.rows)
        return found

    def add(self, block: Block, given: Tensor) -> None:
        """What a block gives to the keys of its part, (B, H, k), to the map and to the rows."""
        on, p = block.on.tensor(given.device), self.ring.problem
        into = bin_of(on, self.ring.routes.grid.Tk, self.key_bins)
        for queries, bin, exact in self.strips(block.at):
            lse = self.lse[block.at][:, :, queries]
            part = sweep(block.problem, block.inputs, ["received"], queries=queries, lse=lse)
            weights = part.finish()["received"]
            assert isinstance(weights, Tensor)
            given[:, :, block.keys] += weights
            pooled = weights.new_zeros(p.B, p.H, self.key_bins).index_add_(2, into, weights)
            self.map[:, :, bin] += pooled
            for n in exact:
                self.rows[:, :, n, on] = weights

    def strips(self, at: Positions) -> Iterator[tuple[slice, int, list[int]]]:
        """Queries, by their places in `at`, with their bin and the exact rows that they are."""
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
        """The sum over the ranks, in their order."""
        return torch.stack(self.ring.transport.all_gather(x)).sum(0)


def _joined(parts: list[Result]) -> Result:
    """Results of some queries after those of others."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}  # type: ignore
    if isinstance(first, TopWeights):
        return TopWeights(*(torch.cat(list(x), 2) for x in zip(*parts, strict=True)))
    return torch.cat(parts, 2)  # type: ignore[arg-type]
