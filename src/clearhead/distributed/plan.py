"""Estimate what a call costs on the ranks of a group, without computing it."""

from dataclasses import dataclass, replace

from torch import Tensor

from ..core.formatting import si
from ..core.masks import Grid, Mask, everything
from ..core.problem.check import Options, make_problem
from ..core.problem.problem import Problem
from .cut import count_received
from .exchange import check_heads, of_teams
from .layouts import Layout, layout_of


@dataclass(frozen=True, repr=False)
class Plan:
    """What each rank computes, sends and stores. Print it for a summary.

    `heads` is the number of ranks in a team, which exchange heads for sequence; 1 is a ring of all
    ranks. `why` is the reason for it. Each list has a number for each rank:

    - `pairs`: (query, key) pairs that the mask allows, over batches and heads.
    - `flops`: operations of the two products over these pairs.
    - `sent` and `received`: bytes in the forward pass. The all-to-all sends `exchanged` of
      them; the others are keys and values in the ring.
    - `sent_back`: bytes sent in the backward pass: keys and values again, and their gradients in
      float32.
    - `memory`: bytes that a rank stores in the forward pass: its shards, its output and state, two
      parts of other ranks, and what it received in the exchange.
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
        """The number of ranks."""
        return len(self.pairs)

    @property
    def balance(self) -> float:
        """The work of the busiest rank divided by the mean: 1 is even."""
        return max(self.pairs) * self.world / max(sum(self.pairs), 1)

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Estimate the time of the forward pass, for a rank that computes `flops` a second and
        receives `bandwidth` bytes a second.

        It is the time that the busiest rank computes, or receives from the ring if that is longer,
        plus the time of the exchange, which overlaps with neither.
        """
        by_rank = zip(self.flops, self.received, self.exchanged, strict=True)
        return max(
            max(work / flops, (got - exchanged) / bandwidth) + exchanged / bandwidth
            for work, got, exchanged in by_rank
        )

    def __repr__(self) -> str:
        in_ring = sum(self.received) - sum(self.exchanged)
        per_byte = si(sum(self.flops) / max(in_ring, 1))
        overlap = (
            f"communication of the ring is hidden if a rank computes fewer than {per_byte}FLOP in "
            "the time of a byte"
            if in_ring
            else "no ring"
        )
        if self.heads > 1:
            overlap += f"; the {si(max(self.exchanged))}B all-to-all does not overlap"
        return "\n".join(
            [
                f"{self.problem}, on {self.world} ranks as {self.layout!r}",
                f"  scheme        heads={self.heads}: {self.why}",
                f"  work          {si(max(self.flops))}FLOP on the busiest rank, "
                f"{self.balance:.3f} of the mean",
                f"  forward       {si(max(self.sent))}B sent by a rank at most, "
                f"{si(max(self.received))}B received",
                f"  backward      {si(max(self.sent_back))}B sent by a rank at most",
                f"  overlap       {overlap}",
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
    """Estimate what each of `world` ranks computes, sends and stores, without a process group.

    >>> import torch, clearhead as ch
    >>> x = torch.empty(1, 8, 32768, 64, device="meta")
    >>> plan = ch.distributed.plan(x, x, x, world=4, layout="head-tail", mask=ch.causal)
    >>> plan.heads, plan.balance
    (4, 1.0)

    Args:
        q, k, v: tensors of the whole sequence, (B, H, Tq, D), (B, G, Tk, D) and (B, G, Tk, Dv);
            meta tensors suffice.
        world: the number of ranks.
        layout, key_layout, mask: as in `attention`.
        heads: as in `attention`. None tries every number that divides the number of ranks and G,
            and chooses the one with the fewest bytes received by a rank in the forward pass. Among
            equal ones it chooses the smallest, since a ring overlaps with the work and the exchange
            does not.

    Raises `BadValue` and `BadType` as `attention` does, and for a layout that does not fit.
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
    why = "as passed" if heads is not None else "the only divisor of the ranks and the key heads"
    if others:
        why = f"a rank receives {si(max(tried[best].received))}B, and {', '.join(others)}"
    if heads is None and best > 1:
        why += "; pass heads= to attention and sharded too"
    return replace(tried[best], why=why)


def _planned(p: Problem, mask: Mask, queries: Layout, keys: Layout, heads: int) -> Plan:
    """Estimate the plan with teams of `heads` ranks."""
    teams, of_heads = (of_teams(layout, heads) for layout in (queries, keys))
    grid = Grid(p.Tq, p.Tk, p.B, p.H)
    counts = [count_received(mask, grid, teams, of_heads, team) for team in range(teams.world)]
    width, wide, own_heads = p.dtype.itemsize, p.wide.itemsize, p.B * p.H // heads
    row = p.B * p.G // heads * (p.D + p.Dv)  # numbers of one key and its value
    of_q, of_out = (own_heads * size * width for size in (p.D, p.Dv))
    costs: list[dict[str, int]] = []
    for rank in range(queries.world):
        team, index = divmod(rank, heads)
        by_owner, pairs = counts[team]
        keys_received = sum(by_owner) - by_owner[team]
        keys_sent = sum(received[team] for received, _ in counts) - by_owner[team]
        # The rank sends its positions of other heads, and receives other positions of its heads.
        members = range(team * heads, (team + 1) * heads)
        q, k = ([len(layout.positions[r]) for r in members] for layout in (queries, keys))
        others = sum(q) - q[index], sum(k) - k[index]
        own = q[index] * of_q + k[index] * row * width
        inputs_received = others[0] * of_q + others[1] * row * width
        out_sent, out_received = others[0] * of_out, (heads - 1) * q[index] * of_out
        exchanged = (heads - 1) * own + out_sent
        sent_back = out_received + inputs_received
        sent_back += row * (keys_sent * width + keys_received * wide)
        two_largest = sorted(n for owner, n in enumerate(by_owner) if owner != team)[-2:]
        memory = own_heads * sum(q) * (p.D * width + p.Dv * (width + 2 * wide) + 6 * wide)
        memory += row * width * (sum(k) + sum(two_largest))
        costs.append(
            {
                "pairs": pairs // heads,
                "flops": 2 * (pairs // heads) * (p.D + p.Dv),
                "sent": exchanged + keys_sent * row * width,
                "received": inputs_received + out_received + keys_received * row * width,
                "exchanged": exchanged,
                "sent_back": sent_back,
                "memory": memory + heads * own * (heads > 1),
            }
        )
    by_rank = {name: [cost[name] for cost in costs] for name in costs[0]}
    return Plan(p.describe(), queries, heads, "", **by_rank)
