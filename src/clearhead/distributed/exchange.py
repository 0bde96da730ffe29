"""Exchange heads for sequence by all-to-all, so that a rank computes some heads of a longer part.

The ranks form teams of `heads` ranks. By the exchange, each rank of a team gets H / heads of the
heads, for all positions of the team. With one team, that is the whole sequence. With several teams,
keys and values are also sent around the ring of the ranks that have the same heads. At the end the
outputs are exchanged back. The exchange is one `all_to_all_single` for each of q, k, v and the
output; it does not overlap with computation.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses"; for teams in a ring Fang & Zhao 2024, "USP: A
Unified Sequence Parallelism Approach for Long Context Generative AI".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..core.errors import BadValue, whole_number
from ..core.functional.eager import eagerly
from ..core.problem.biases import Alibi
from ..core.problem.problem import Inputs, Problem
from ..core.torch_state import batches_gradients
from .cut import Cut, routes
from .handshake import agree, reporting_errors
from .layouts import Layout, Positions
from .ring import Ring
from .transport import Transport


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks that exchange heads with one rank, and that rank itself."""

    transport: Transport
    size: int
    call: str  # the name of the call, the same on all ranks

    @property
    def number(self) -> int:
        return self.transport.rank // self.size

    @property
    def index(self) -> int:
        """The rank's index in its team, which determines its heads."""
        return self.transport.rank % self.size

    @property
    def ranks(self) -> range:
        return range(self.number * self.size, (self.number + 1) * self.size)

    def of_head(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of this rank's heads."""
        return x.chunk(self.size, dim)[self.index]

    def to_heads(self, x: Tensor, layout: Layout) -> Tensor:
        """Exchange (B, H, t, D), of all heads and this rank's positions, for (B, H / size, T, D),
        of this rank's heads and the team's positions, in increasing order."""
        return _Exchange.apply(x, self, layout, True)

    def to_sequence(self, x: Tensor, layout: Layout) -> Tensor:
        """Exchange heads back for sequence: the inverse of `to_heads`."""
        return _Exchange.apply(x, self, layout, False)

    def exchange(self, x: Tensor, layout: Layout, to_heads: bool) -> Tensor:
        """Exchange in one of the directions, without a gradient."""
        counts = [len(layout.positions[rank]) for rank in self.ranks]
        order = torch.cat([layout.positions[rank].tensor() for rank in self.ranks]).argsort()
        order, B, D = order.to(x.device), x.shape[0], x.shape[3]
        if to_heads:
            parts = [part.contiguous() for part in x.chunk(self.size, 1)]
            sizes = [(B, parts[0].shape[1], n, D) for n in counts]
            return torch.cat(self._all_to_all(parts, sizes), 2).index_select(2, order)
        by_rank = x.index_select(2, order.argsort()).split(counts, 2)
        sizes = [(B, x.shape[1], counts[self.index], D)] * self.size
        return torch.cat(self._all_to_all([x.contiguous() for x in by_rank], sizes), 1)

    def _all_to_all(self, parts: list[Tensor], sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        nothing, first = parts[0].new_empty(0), self.ranks.start
        world = range(self.transport.world)
        outgoing = [parts[r - first] if r in self.ranks else nothing for r in world]
        incoming = [
            nothing.new_empty(sizes[r - first]) if r in self.ranks else nothing for r in world
        ]
        self.transport.all_to_all(outgoing, incoming)
        return [incoming[r] for r in self.ranks]


def must_be_first_order(transport: Transport) -> None:
    """Raise `BadValue` on every rank for a gradient that records its own graph, or for a batch of
    gradients."""
    with reporting_errors(transport):
        if torch.is_grad_enabled() or batches_gradients():
            keyword = "is_grads_batched" if batches_gradients() else "create_graph"
            rule = "the ranks exchange the numbers of one gradient, which has no gradient itself."
            hint = f"omit {keyword}=True, or use clearhead.attention on one machine."
            raise BadValue(f"A gradient over ranks was requested with {keyword}=True.", rule, hint)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, layout: Layout, to_heads: bool) -> Tensor:
        ctx.team, ctx.layout, ctx.to_heads = team, layout, to_heads
        return team.exchange(x, layout, to_heads)

    @staticmethod
    @eagerly
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        team, to_heads = ctx.team, not ctx.to_heads
        must_be_first_order(team.transport.everyone)
        if to_heads:  # for the gradient of the output, which comes first
            agree(team.transport, {"call": f"backward of the heads of {team.call}"}, 0, 0)
        with team.transport.computing():
            return team.exchange(dx, ctx.layout, to_heads), None, None, None


def exchanged_ring(ring: Ring, inputs: Inputs, heads: int) -> tuple[Ring, Inputs, Team]:
    """Exchange the inputs, and return the ring of the ranks that then have the same heads."""
    p, of_rank, team = ring.problem, ring.routes, Team(ring.transport, heads, ring.name)
    both = of_rank.queries, of_rank.keys
    q, k, v = (
        team.to_heads(x, layout) for x, layout in zip(inputs, (*both, of_rank.keys), strict=True)
    )
    first, count = team.index * (p.H // heads), p.H // heads
    grid = of_rank.grid._replace(H=count)
    every_query, every_key = (Positions((range(size),)) for size in grid[:2])
    mask = Cut(of_rank.mask, of_rank.grid, every_query, every_key, first)
    bias = ring.bias
    if isinstance(bias, Alibi):
        bias = replace(bias, slopes=team.of_head(bias.of(of_rank.grid), 0))
    problem = replace(
        p,
        H=count,
        G=p.G // heads,
        Tq=q.shape[2],
        Tk=k.shape[2],
        sinks=None if p.sinks is None else team.of_head(p.sinks, 0),
    )
    world = team.transport.world
    same_heads = Subgroup(team.transport, range(team.index, world, heads))
    queries, keys = (of_teams(layout, heads) for layout in both)
    of_heads = routes(mask, grid, queries, keys, team.number)
    ring = replace(
        ring, problem=problem, bias=bias, routes=of_heads, transport=same_heads, first_head=first
    )
    return ring, Inputs(q, k, v), team


def of_teams(layout: Layout, heads: int) -> Layout:
    """Return which positions each team of `heads` ranks holds."""
    starts = range(0, layout.world, heads)
    return Layout([chain.from_iterable(layout.ranges[s : s + heads]) for s in starts])


def check_heads(heads: object, world: int, p: Problem, bias: object) -> int:
    """Return the number of ranks in a team. Raises `BadValue` if it does not divide the number of
    ranks and G."""
    count = whole_number(heads)
    hint = "omit heads=, or pass distributed.plan(...).heads."
    if count is None or count < 1 or world % count or p.G % count:
        rule = "heads= is the size of a team of ranks; it divides the number of ranks and G."
        raise BadValue(f"heads={heads!r}, with {world} ranks, H={p.H} and G={p.G}.", rule, hint)
    if count > 1 and not (bias is None or isinstance(bias, Alibi)):
        rule = "a rank has the bias of its own queries only, but would compute those of its team."
        raise BadValue(f"heads={count}, with a bias tensor.", rule, hint)
    return count


class Subgroup(Transport):
    """Some of the ranks of a transport, as a transport of their own."""

    def __init__(self, parent: Transport, ranks: range) -> None:
        self.parent, self.ranks = parent, ranks
        self.rank, self.world = ranks.index(parent.rank), len(ranks)
        self.device, self.history = parent.device, parent.history

    @property
    def everyone(self) -> Transport:
        return self.parent.everyone

    def batch_isend_irecv(self, outgoing: Any, incoming: Any) -> Any:
        return self.parent.batch_isend_irecv(*self._named(outgoing, incoming))

    def start(self, outgoing: Any, incoming: Any) -> Any:
        return self.parent.start(*self._named(outgoing, incoming))

    def give_up(self, error: BaseException) -> None:
        self.parent.give_up(error)

    def store_reason(self, text: str) -> None:
        self.parent.store_reason(text)

    def _named(self, *mail: Any) -> list[list[tuple[int, Tensor]]]:
        return [[(self.ranks[rank], x) for rank, x in part] for part in mail]
