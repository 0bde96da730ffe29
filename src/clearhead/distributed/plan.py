"""What a question costs on the ranks of a group, without asking it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import Grid, Mask, everything
from ..problem.check import Options, make_problem
from ..problem.problem import Problem
from .cut import wanted_of_each
from .layouts import Layout, layout_of

UNITS = "", "k", "M", "G", "T", "P"


@dataclass(frozen=True, repr=False)
class Plan:
    """What each rank computes, sends and holds. Prints itself.

    `pairs` counts the (query, key) pairs that may look, over batches and heads, `flops` the two
    products over them; `sent` and `received` are bytes of keys and values in forward, `sent_back`
    those of backward, which sends keys and values again and their gradients in float32; `memory` is
    what a rank holds in forward: its shards, its output and state, and two parts of other ranks.
    """

    question: str
    layout: Layout
    pairs: list[int]
    flops: list[int]
    sent: list[int]
    received: list[int]
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
        bytes a second: as long as the busiest rank computes or receives, whichever is longer."""
        both = zip(self.flops, self.received, strict=True)
        return max(max(work / flops, got / bandwidth) for work, got in both)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        per_byte = sum(self.flops) / max(sum(self.received), 1)
        hidden = (
            f"hides behind the work where a rank computes fewer than {_si(per_byte)}FLOP in the "
            "time of a byte"
            if sum(self.received)
            else "nothing travels"
        )
        return "\n".join(
            [
                f"{self.question}, on {self.world} ranks as {self.layout!r}",
                f"  work          {_si(max(self.flops))}FLOP on the busiest rank, "
                f"{self.balance:.3f} of the mean",
                f"  forward       {_si(max(self.sent))}B sent by a rank at most, "
                f"{_si(max(self.received))}B received",
                f"  backward      {_si(max(self.sent_back))}B sent by a rank at most",
                f"  overlap       {hidden}",
                f"  memory        {_si(max(self.memory))}B on a rank at most, in forward",
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
    mask: Mask | None = None,
) -> Plan:
    """What each of `world` ranks would compute, send and hold; needs no process group.

    >>> import torch, clearhead as ch
    >>> x = torch.empty(1, 8, 32768, 64, device="meta")
    >>> ch.distributed.plan(x, x, x, world=4, layout="head-tail", mask=ch.causal).balance
    1.0

    Args:
        q, k, v: of the whole sequence, (B, H, Tq, D), (B, G, Tk, D) and (B, G, Tk, Dv); meta
            tensors do.
        world: how many ranks.
        layout, key_layout, mask: as in `attention`.

    Raises `BadValue`, `BadType`: what `attention` refuses, a layout that does not fit.
    """
    p, _ = make_problem(q, k, v, Options(mask=mask))
    queries = layout_of(layout, p.Tq, world)
    keys = layout_of(layout if key_layout is None else key_layout, p.Tk, world)
    rule = everything if mask is None else mask
    grid = Grid(p.Tq, p.Tk, p.B, p.H)
    found = [wanted_of_each(rule, grid, queries, keys, rank) for rank in range(world)]
    pairs = [of_rank for _, of_rank in found]
    received = [sum(counts) - counts[rank] for rank, (counts, _) in enumerate(found)]
    sent = [
        sum(counts[rank] for counts, _ in found) - found[rank][0][rank] for rank in range(world)
    ]
    row = p.B * p.G * (p.D + p.Dv)
    width, wide = (torch.empty((), dtype=dtype).element_size() for dtype in (p.dtype, p.wide))
    return Plan(
        question=p.describe(),
        layout=queries,
        pairs=pairs,
        flops=[2 * n * (p.D + p.Dv) for n in pairs],
        sent=[n * row * width for n in sent],
        received=[n * row * width for n in received],
        sent_back=[s * row * width + r * row * wide for s, r in zip(sent, received, strict=True)],
        memory=[_memory(p, queries, keys, found[r][0], r, width, wide) for r in range(world)],
    )


def _memory(
    p: Problem, queries: Layout, keys: Layout, wanted: list[int], rank: int, width: int, wide: int
) -> int:
    here, row = len(queries.held[rank]), p.B * p.G * (p.D + p.Dv) * width
    others = sorted(n for owner, n in enumerate(wanted) if owner != rank)
    answer = p.B * p.H * here * (p.D * width + p.Dv * (width + 2 * wide) + 6 * wide)
    return answer + row * (len(keys.held[rank]) + sum(others[-2:]))


def _si(number: float) -> str:
    unit = 0
    while number >= 1000 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.4g} {UNITS[unit]}"
