"""What a call costs on the ranks of a group, without computing it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formatting import si
from ..masks import Grid, Mask, everything
from ..problem.check import Options, make_problem
from ..problem.problem import Problem
from .cut import count_received
from .exchange import check_heads, of_teams
from .layouts import Layout, layout_of


@dataclass(frozen=True, repr=False)
class Plan:
    """What each rank computes, sends and holds. Prints itself.

    `heads` is the number of ranks that exchange heads for sequence, 1 for a ring of all ranks, and
    `why` says how it was chosen. `pairs` counts the (query, key) pairs that may look, over batches
    and heads, `flops` the two products over them; `sent` and `received` are bytes in forward, of
    which `exchanged` are sent in the exchange and the others are keys and values in the ring;
    `sent_back` those of backward, which sends keys and values again and their gradients in float32;
    `memory` is what a rank holds in forward: its shards, its output and state, two parts of other
    ranks, and what it got in the exchange.
    """

    problem: str
    layout: Layout
    heads: int
    why: str
    pairs: list[int]
    flops: list[int]
    sent: list[int]
    received: list[int]
    exchanged: list[int]
    sent_back: list[int]
    memory: list[int]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.pairs)

    @property
    def balance(self) -> float:
        """The work of the busiest rank over the mean: 1 is even."""
        return max(self.pairs) * self.world / max(sum(self.pairs), 1)

    def seconds(self, flops: float, bandwidth: float) -> float:
        """How long forward takes where a rank computes `flops` a second and receives `bandwidth`
        bytes a second: as long as the busiest rank computes or receives from the ring, whichever
        is longer, and the exchange, which overlaps with neither."""
        each = zip(self.flops, self.received, self.exchanged, strict=True)
        return max(
            max(work / flops, (got - exchanged) / bandwidth) + exchanged / bandwidth
            for work, got, exchanged in each
        )

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        in_ring = sum(self.received) - sum(self.exchanged)
        per_byte = si(sum(self.flops) / max(in_ring, 1))
        hidden = (
            f"the ring hides behind the work where a rank computes fewer than {per_byte}FLOP in "
            "the time of a byte"
            if in_ring
            else "nothing travels in a ring"
        )
        if self.heads > 1:
            hidden += f"; the exchange, {si(max(self.exchanged))}B, hides behind nothing"
        return "\n".join(
            [
                f"{self.problem}, on {self.world} ranks as {self.layout!r}",
                f"  scheme        heads={self.heads}: {self.why}",
                f"  work          {si(max(self.flops))}FLOP on the busiest rank, "
                f"{self.balance:.3f} of the mean",
                f"  forward       {si(max(self.sent))}B sent by a rank at most, "
                f"{si(max(self.received))}B received",
                f"  backward      {si(max(self.sent_back))}B sent by a rank at most",
                f"  overlap       {hidden}",
                f"  memory        {si(max(self.memory))}B on a rank at most, in forward",
            ]
        )


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    world: int,
    layout: Layout | str = "contiguous",
    key_layout: Layout | str | None = None,
    heads: int | None = None,
    mask: Mask | None = None,
) -> Plan:
    """What each of `world` ranks would compute, send and hold; needs no process group.

    >>> import torch, clearhead as ch
    >>> x = torch.empty(1, 8, 32768, 64, device="meta")
    >>> found = ch.distributed.plan(x, x, x, world=4, layout="head-tail", mask=ch.causal)
    >>> found.heads, found.balance
    (4, 1.0)

    Args:
        q, k, v: of the whole sequence, (B, H, Tq, D), (B, G, Tk, D) and (B, G, Tk, Dv); meta
            tensors do.
        world: how many ranks.
        layout, key_layout, mask: as in `attention`.
        heads: as in `attention`; None tries every number that divides the ranks and G, and takes
            the one with which the busiest rank receives the fewest bytes in forward. Of equal ones
            it takes the smaller, since a ring overlaps with the work and the exchange does not.

    Raises `BadValue`, `BadType`: what `attention` refuses, a layout that does not fit.
    """
    p, _ = make_problem(q, k, v, Options(mask=mask))
    queries = layout_of(layout, p.Tq, world)
    keys = layout_of(layout if key_layout is None else key_layout, p.Tk, world)
    rule = everything if mask is None else mask
    counts = [heads] if heads is not None else [n for n in range(1, world + 1) if not world % n]
    counts = [n for n in counts if heads is not None or not p.G % n]
    tried = {n: _planned(p, rule, queries, keys, check_heads(n, world, p, None)) for n in counts}
    best = min(tried, key=lambda n: (max(tried[n].received), n))
    others = [f"{si(max(x.received))}B with heads={n}" for n, x in tried.items() if n != best]
    why = "as asked" if heads is not None else "nothing else divides the ranks and the key heads"
    if others:
        why = f"a rank receives {si(max(tried[best].received))}B, and {', '.join(others)}"
    if heads is None and best > 1:
        why += "; attention and sharded exchange no heads unless told so"
    return replace(tried[best], why=why)


def _planned(p: Problem, mask: Mask, queries: Layout, keys: Layout, heads: int) -> Plan:
    """The plan with teams of so many ranks."""
    world = queries.world
    teams, of_heads = (of_teams(layout, heads) for layout in (queries, keys))
    grid = Grid(p.Tq, p.Tk, p.B, p.H)
    found = [count_received(mask, grid, teams, of_heads, team) for team in range(teams.world)]
    row = p.B * p.G // heads * (p.D + p.Dv)  # numbers of one key and its value
    width, wide = (torch.empty((), dtype=dtype).element_size() for dtype in (p.dtype, p.wide))
    sent, received, sent_back, exchanged, pairs, memory = ([0] * world for _ in range(6))
    for rank in range(world):
        team, place = divmod(rank, heads)
        keys_received = sum(found[team][0]) - found[team][0][team]
        keys_sent = sum(counts[team] for counts, _ in found) - found[team][0][team]
        # Heads that go to each other rank of the team, and what comes for the heads here.
        members = range(team * heads, (team + 1) * heads)
        q, k = ([len(layout.held[r]) for r in members] for layout in (queries, keys))
        elsewhere = sum(q) - q[place], sum(k) - k[place]
        of_q, of_out = (p.B * p.H // heads * size * width for size in (p.D, p.Dv))
        gone = (heads - 1) * (q[place] * of_q + k[place] * row * width)
        got = elsewhere[0] * of_q + elsewhere[1] * row * width
        back = elsewhere[0] * of_out, (heads - 1) * q[place] * of_out
        exchanged[rank] = gone + back[0]
        sent[rank] = exchanged[rank] + keys_sent * row * width
        received[rank] = got + back[1] + keys_received * row * width
        sent_back[rank] = back[1] + got + keys_sent * row * width + keys_received * row * wide
        pairs[rank] = found[team][1] // heads
        memory[rank] = _memory(p, teams, of_heads, found[team][0], team, width, wide, heads)
        memory[rank] += (gone + k[place] * row * width + q[place] * of_q) * (heads > 1)
    return Plan(
        problem=p.describe(),
        layout=queries,
        heads=heads,
        why="",
        pairs=pairs,
        flops=[2 * n * (p.D + p.Dv) for n in pairs],
        sent=sent,
        received=received,
        exchanged=exchanged,
        sent_back=sent_back,
        memory=memory,
    )


def _memory(
    p: Problem,
    queries: Layout,
    keys: Layout,
    received: list[int],
    rank: int,
    width: int,
    wide: int,
    heads: int,
) -> int:
    """In the ring of one team, which answers H / heads heads."""
    here, row = len(queries.held[rank]), p.B * p.G // heads * (p.D + p.Dv) * width
    others = sorted(n for owner, n in enumerate(received) if owner != rank)
    answer = p.B * p.H // heads * here * (p.D * width + p.Dv * (width + 2 * wide) + 6 * wide)
    return answer + row * (len(keys.held[rank]) + sum(others[-2:]))
