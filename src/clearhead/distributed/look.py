"""Statistics of attention weights whose sequence is cut over ranks: the numbers of one machine.

Keys travel round the ring as in `attention`. The sums of the first sweep merge over the keys of all
ranks; then a weight is known, and what each key receives is sent back to the rank that holds it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..engines import compute_stats
from ..errors import BadValue
from ..masks import Grid, Mask
from ..problem.biases import Bias
from ..problem.check import Options, make_problem
from ..problem.problem import Inputs, Problem
from ..stats import Look, Partial, Result, Statistic, Top, mass, parse_stats, sweep, topk
from ..stats.top_scores import TopScores
from .attention import TIMEOUT, Question, agreed, output
from .cut import Cut
from .layouts import Layout, Positions
from .ring import Coming, Ring, pieces
from .transport import Group, GroupTransport, Transport

WHOLE = "map", "rows"  # of the matrix, not of a query or a key


def look(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stats: Iterable[str | Statistic] = ("lse", "entropy"),
    group: Group = None,
    layout: Layout | str | None = None,
    key_layout: Layout | str | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    timeout: float = TIMEOUT,
) -> Look:
    """The output of `distributed.attention`, and exact statistics of its weights.

    Args:
        stats: what `clearhead.look` takes but `map` and `rows`. Keys are positions of the whole
            sequence, and so are those that groups of `mass` speak of.
        q, k, v and the other arguments: as in `distributed.attention`.

    Returns:
        A `Look`: `.out`, and one attribute for each statistic, of this rank's queries; "received"
        is of this rank's keys, (B, H, k). `unshard` gathers them, dim=2. Statistics carry no
        gradient.

    Raises what `distributed.attention` raises, and `BadValue` for unknown statistics.
    """
    transport = GroupTransport(group, timeout)
    question = Question(mask, bias, scale, softcap, sinks, dropout, seed, layout, key_layout)
    return looked(transport, question, q, k, v, stats)


def looked(
    transport: Transport,
    asked: Question,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Iterable[str | Statistic],
) -> Look:
    wanted = parse_stats(stats)
    for statistic in wanted:
        if statistic.name in WHOLE:
            raise BadValue(
                f"distributed.look was asked for {statistic.name}.",
                "it gives what belongs to a query or a key, on the rank that holds it.",
                "ask for other statistics, or for this one of a text that fits one machine.",
            )
    ring, inputs = agreed(transport, asked, q, k, v, stats=", ".join(s.name for s in wanted))
    out = output(ring, inputs)
    with torch.no_grad():
        found = _counted(ring, inputs, parse_stats(wanted, ring.routes.grid))
    return Look(ring.problem, out, found)


def _counted(ring: Ring, inputs: Inputs, wanted: tuple[Statistic, ...]) -> dict[str, Result]:
    first = tuple(s for s in wanted if s.sweep == "first")
    rows: dict[Positions, Partial] = {}
    for at, part in _of_blocks(ring, inputs, first):
        rows[at] = rows[at].merge(part) if at in rows else part
    complete = [replace(p, problem=replace(p.problem, Tk=len(p.keys))) for p in rows.values()]
    of_queries = [p.finish() for p in complete]
    found = {s.name: _joined([part[s.name] for part in of_queries]) for s in first}
    if len(first) < len(wanted):
        found["received"] = _received(ring, inputs, dict(zip(rows, complete, strict=True)))
    return {s.name: found[s.name] for s in wanted}


def _of_blocks(
    ring: Ring, inputs: Inputs, wanted: tuple[Statistic, ...]
) -> Iterator[tuple[Positions, Partial]]:
    """The first sweep: for queries at some positions, what some of their keys tell."""
    p, grid = ring.problem, ring.routes.grid
    q, k, none = inputs.q, inputs.k, inputs.k[..., :0]
    nothing = Positions(())
    for at, rows in pieces(ring.routes.queries.held[ring.transport.rank], ring.by_range):
        no_keys = Inputs(q[:, :, rows], k[:, :, :0], none[:, :, :0])
        asked, _ = make_problem(*no_keys, Options(scale=p.scale))
        yield at, _partial(ring, asked, no_keys, wanted, grid, at, nothing)
    for owner, part in ring.parts(k, none):
        for block in ring.blocks(owner, q, part):
            at, on = block.at, block.on
            yield at, _partial(ring, block.problem, block.inputs, wanted, grid, at, on)


def _partial(
    ring: Ring,
    asked: Problem,
    inputs: Inputs,
    wanted: tuple[Statistic, ...],
    grid: Grid,
    at: Positions,
    on: Positions,
) -> Partial:
    cut = [_cut(s, grid, at, on) for s in wanted]
    part = compute_stats(asked, inputs, cut)
    assert part.rows is not None
    rows, keys = part.rows, on.tensor(asked.device)
    for s in wanted:
        if isinstance(s, topk):
            top = TopScores(*rows.more["top"]).at(keys, min(s.n, grid.Tk))
            rows = rows._replace(more={**rows.more, "top": top})
    whole = replace(ring.problem, Tq=len(at))
    return Partial(whole, wanted, at.tensor(asked.device), keys, rows, None)


def _cut(statistic: Statistic, grid: Grid, at: Positions, on: Positions) -> Statistic:
    """The same of a block; groups of keys stand at their absolute positions."""
    if not isinstance(statistic, mass):
        return statistic
    masks = zip(statistic.groups, statistic.masks, strict=True)
    return mass({name: Cut(mask, grid, at, on) for name, mask in masks})


def _received(ring: Ring, inputs: Inputs, rows: dict[Positions, Partial]) -> Tensor:
    """The second sweep: what each key of this rank receives from the queries of all."""
    here, world, p = ring.transport.rank, ring.transport.world, ring.problem
    total = torch.zeros(p.B, p.H, inputs.k.shape[2], dtype=p.wide, device=p.device)
    returning: list[tuple[int, Coming]] = []
    for step, (owner, part) in enumerate(ring.parts(inputs.k, inputs.k[..., :0])):
        given = total.new_zeros(p.B, p.H, part.k.shape[2])
        for block in ring.blocks(owner, inputs.q, part):
            found = sweep(block.problem, block.inputs, ["received"], lse=rows[block.at].lse)
            assert found.sums is not None
            given[:, :, block.keys] += found.sums["received"]
        if step == 0:
            ring.add_to(here, total, given)
            continue
        asker = (here + step) % world
        shapes = (p.B, p.H, len(ring.routes.asked[asker])), (0,)
        mail = [(owner, given.flatten())]
        returning.append((asker, Coming(ring.transport, mail, asker, shapes, total)))
    for asker, coming in returning:
        ring.add_to(asker, total, coming.wait().k)
    return total


def _joined(parts: list[Result]) -> Result:
    """Results of some queries after those of others."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}  # type: ignore
    if isinstance(first, Top):
        return Top(*(torch.cat(list(x), 2) for x in zip(*parts, strict=True)))
    return torch.cat(parts, 2)  # type: ignore[arg-type]
