"""Decoding: few new queries, the same on every rank, on keys that are spread over the ranks.

Each rank answers the queries on its own keys, and one exchange of softmax states, (B, H, t, Dv + 2)
numbers, merges them; the cache itself never travels. The order of merging is that of the ranks, so
all of them get the same bits.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import BadValue
from ..functional.ambient import Ambient
from ..masks import Grid, Mask, everything
from ..problem.biases import Alibi, Bias
from ..problem.check import Options, make_problem
from ..problem.online_softmax import State, merge
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistic
from .attention import TIMEOUT, check_on_all_positions, must_be_eager
from .block import Block
from .cut import Routes
from .handshake import agree, telling_others, written
from .layouts import Layout
from .local import no_keys
from .ring import Part, Ring
from .transport import Group, GroupTransport, Transport

DIGEST_BYTES = 8
TURN = 256  # new tokens that one rank keeps before the next one does


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keys: Layout,
    group: Group = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    timeout: float = TIMEOUT,
) -> Tensor:
    """`clearhead.attention` of queries that every rank has, on keys that are spread over the ranks.

    >>> ch.distributed.decode(q, k, v, keys=layout, mask=ch.Causal(align="end"))  # doctest: +SKIP

    Args:
        q: the queries, the same on all ranks, (B, H, t, D).
        k, v: keys and values of this rank, (B, G, k, D) and (B, G, k, Dv).
        keys: the layout of all keys: which positions those of this rank and of the others have.
        group, timeout: as in `distributed.attention`.
        mask: who may look at whom, of the t queries and all keys; None means every pair.
        bias: `alibi()`; None adds nothing.
        scale, softcap, sinks: as in `clearhead.attention`, the same on all ranks.

    Returns:
        (B, H, t, Dv), the same bits on all ranks, without a gradient. A rank sends its state,
        B H t (Dv + 2) numbers, to each of the others, however long the cache is.

    Raises what `distributed.attention` raises, and `BadValue` for a bias of numbers.
    """
    options = Options(mask, bias, scale, softcap, sinks)
    return decode_step(GroupTransport(group, timeout), options, keys, q, k, v)


@torch.no_grad()
def decode_step(
    transport: Transport,
    options: Options,
    keys: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    meet: bool = True,
    layer: str = "",
) -> Tensor:
    """As `decode`. With `meet` the ranks first compare their calls, and then their queries; without
    it, which saves a message, a call that differs is noticed when the states arrive."""
    must_be_eager(q, k, v)
    with telling_others(transport) if meet else nullcontext():
        ring, inputs = _ring(options, keys, transport, q, k, v)
    p = ring.problem
    call: dict[str, object] = {
        "call": "decode",
        "layer": layer,
        "dtype": p.dtype,
        "heads and sizes": f"B={p.B} H={p.H} G={p.G} Tq={p.Tq} D={p.D} Dv={p.Dv}",
        "mask": options.mask,
        "bias": options.bias,
        "scale": p.scale,
        "softcap": p.softcap,
        "sinks": p.sinks,
        "keys": keys,
    }
    if meet:
        agree(transport, call, p.Tq, p.Tk)
    with transport.answering():
        mine = ring.state_after(0, inputs.q, Part(inputs.k, inputs.v), None) or no_keys(p, p.Tq)
        states, queries = _exchanged(transport, mine, inputs.q if meet else inputs.q[:, :0], call)
    _must_be_equal(queries)
    total = states[0]
    for state in states[1:]:
        total = merge(total, state)
    return p.shape_back(ring.finish(total)[0].to(p.dtype))


def _must_be_equal(queries: list[Tensor]) -> None:
    """Raises `BadValue` on every rank if they differ by more than other processors round."""
    for rank, q in enumerate(queries):
        far = (q - queries[0]).abs() > 0.01 * queries[0].abs().amax() if q.numel() else q.bool()
        if bool(far.any()):
            raise BadValue(
                f"The new queries of rank {rank} are others than those of rank 0.",
                "while decoding every rank runs the model on the same new tokens.",
                "sample on one rank and broadcast the token, or give every rank a generator of the "
                "same seed.",
            )


def _ring(
    options: Options, keys: Layout, transport: Transport, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Ring, Inputs]:
    if options.dropout or not (options.bias is None or isinstance(options.bias, Alibi)):
        raise BadValue(
            f"decode got {'dropout' if options.dropout else 'a bias of numbers'}.",
            "new queries are answered without dropout, and with ALiBi or no bias.",
            "call model.eval(), or ask distributed.attention.",
        )
    p, inputs = make_problem(q, k, v, options._replace(mask=None, bias=None))
    held = keys.held[transport.rank] if keys.world == transport.world else ()
    if keys.world != transport.world or len(held) != p.Tk:
        raise BadValue(
            f"Rank {transport.rank} of {transport.world} has {p.Tk} keys, and {keys!r} gives it "
            f"{len(held)}.",
            "the layout says which positions each rank holds.",
            "pass the layout by which the keys were cut, with the tokens that were added since.",
        )
    grid = Grid(p.Tq, keys.length, p.B, p.H)
    check_on_all_positions(p, options.mask, options.bias, grid)
    queries = Layout([[range(p.Tq)]])
    mask = everything if options.mask is None else options.mask
    # All queries are here, and of the keys those of this rank alone.
    found = Routes(mask, grid, 0, queries, keys, [keys.held[transport.rank]], [])
    return Ring(p, options.bias, found, transport, "decode"), inputs


def _exchanged(
    transport: Transport, mine: State, queries: Tensor, call: dict[str, object]
) -> tuple[list[State], list[Tensor]]:
    """The states of all ranks, and the queries of their first head. A digest of the call goes with
    them: where one differs, all ranks compare their calls, which raises."""
    digest = hashlib.blake2b(written(call), digest_size=DIGEST_BYTES).digest()
    first = queries[:, :1].to(mine.max.dtype)
    tensors = [*mine.tensors(), first]
    numbers = torch.cat([x.reshape(-1) for x in tensors])
    head = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(numbers.device)
    sent = torch.cat([head, numbers.view(torch.uint8)])
    found = transport.all_gather(sent.to(transport.device))
    if any(not torch.equal(x[:DIGEST_BYTES].cpu(), head.cpu()) for x in found):
        agree(transport, call, 0, 0)
    sizes = [x.numel() for x in tensors]
    states, firsts = [], []
    for x in found:
        parts = x[DIGEST_BYTES:].clone().view(numbers.dtype).to(numbers.device).split(sizes)
        *shaped, first = (part.view_as(like) for part, like in zip(parts, tensors, strict=True))
        states.append(mine.with_tensors(iter(shaped)))
        firsts.append(first)
    return states, firsts


# ------------------------------------------------------------------------ inside of `sharded`


@dataclass(eq=False)
class Decoding:
    """New tokens after a text that is spread over ranks, as `sharded` answers them."""

    layout: Layout  # of the text
    group: Group
    timeout: float
    rank: int
    tokens_before: int
    block: Block
    met: bool = False  # have the ranks compared their calls?

    def layout_after(self, count: int) -> Layout:
        """Which positions each rank holds, once `count` new tokens have been added."""
        first, world = self.layout.length, self.layout.world
        held = [list(of_rank) for of_rank in self.layout.ranges]
        end = self.tokens_before + count
        for turn, start in enumerate(range(first, end, TURN)):
            held[turn % world].append(range(start, min(start + TURN, end)))
        return Layout(held)

    def positions_from(self, start: int, count: int) -> Tensor:
        return torch.arange(self.tokens_before, self.tokens_before + count)

    def cached_part(self, x: Tensor) -> Tensor:
        owner = self._owner(x.shape[-2])
        return x[..., owner == self.rank, :]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: Ambient
    ) -> Tensor:
        transport = GroupTransport(self.group, self.timeout)
        with telling_others(transport):
            positions = self.positions_from(0, q.shape[-2])
            layer = self.block.enter_call(positions, any_mask=False).layer
            must_be_answered_together(engine, around)
        keys = self.layout_after(q.shape[-2])
        mine, new = len(self.layout.held[self.rank]), keys.length - self.layout.length
        if k.shape[-2] == mine + new:  # a cache that keeps every new token
            owner = (torch.arange(new) // TURN) % self.layout.world
            kept = torch.cat([torch.arange(mine), mine + (owner == self.rank).nonzero()[:, 0]])
            k, v = k[..., kept.to(k.device), :], v[..., kept.to(v.device), :]
        meet, self.met = not self.met, True
        return decode_step(transport, options, keys, q, k, v, meet, layer)

    def _owner(self, count: int) -> Tensor:
        """The rank that keeps each of the new tokens."""
        at = torch.arange(self.tokens_before, self.tokens_before + count) - self.layout.length
        return (at // TURN) % self.layout.world

    def refuse(self, error: BadValue) -> BadValue:
        self.block.refused = error
        return error

    def must_be_one_text(self, ids: Tensor) -> None:
        pass  # the new tokens are those of one text

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
    ) -> dict[str, Result]:
        raise _no_statistics()

    def masses(
        self, problem: Problem, inputs: Inputs, queries: Tensor, cells: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        raise _no_statistics()

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """Every rank has all of it."""
        return x


def _no_statistics() -> BadValue:
    return BadValue(
        "Statistics were asked for while decoding.",
        "the keys of a step are spread over the ranks, and only the output is merged.",
        "watch the text itself, inside of distributed.sharded.",
    )


def must_be_answered_together(engine: str, around: Ambient) -> None:
    """Raises `BadValue` for an engine that was asked for, and inside of `intervene`."""
    if engine != "auto" or around.editors:
        gave = f"engine={engine!r} was asked for" if engine != "auto" else "Calls are edited"
        raise BadValue(
            f"{gave} inside of distributed.sharded.",
            "there the ranks answer together, each with the engine that can.",
            "leave engine= out, and intervene outside of it.",
        )
