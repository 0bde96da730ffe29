"""Decode: compute few new queries, the same on every rank, over keys that are spread over the
ranks.

Each rank computes the queries on its own keys. Then the ranks exchange softmax states,
(B, H, t, Dv + 2) numbers, and merge them; the cache is never sent. All ranks merge in the same
order, so they get the same bits.
"""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..core.errors import BadValue, must_be_of
from ..core.functional.ambient import Ambient
from ..core.functional.eager import eagerly
from ..core.masks import Grid, Mask, everything
from ..core.problem.biases import Alibi, Bias
from ..core.problem.check import Options, make_problem
from ..core.problem.online_softmax import State, merge
from ..core.problem.problem import Inputs
from .attention import TIMEOUT, check_on_all_positions, described, must_be_eager
from .block import InBlock, OpenBlock
from .cut import Routes
from .handshake import agree, reporting_errors, written
from .layouts import Layout
from .local import no_keys
from .ring import Part, Ring
from .transport import Group, GroupTransport, Transport

DIGEST_BYTES = 8
TURN = 256  # consecutive new tokens that one rank stores


@eagerly
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
    """Compute `clearhead.attention` of queries that every rank has, over the keys of all ranks.

    >>> ch.distributed.decode(q, k, v, keys=layout, mask=ch.Causal(align="end"))  # doctest: +SKIP

    Args:
        q: the queries, the same on all ranks, (B, H, t, D).
        k, v: keys and values of this rank, (B, G, k, D) and (B, G, k, Dv).
        keys: the layout of all keys: which positions each rank holds.
        group, timeout: as in `distributed.attention`.
        mask: which of the t queries may look at which keys; None means all.
        bias: `alibi()`; None means no bias.
        scale, softcap, sinks: as in `clearhead.attention`, the same on all ranks.

    Returns:
        (B, H, t, Dv), the same bits on all ranks, without a gradient. A rank sends each other rank
        B H t (Dv + 2) numbers, independent of the length of the cache.

    Raises what `distributed.attention` raises, and `BadValue` for a bias tensor.
    """
    options = Options(mask, bias, scale, softcap, sinks)
    return decode_step(GroupTransport(group, timeout), options, keys, q, k, v)


@torch.no_grad()
def decode_step(
    transport: Transport, options: Options, keys: Layout, q: Tensor, k: Tensor, v: Tensor,
    compare: bool = True, layer: str = "",
) -> Tensor:  # fmt: skip
    """Compute `decode` over any transport. With `compare` the ranks compare their calls first, and
    then their queries. Without it, which saves a message, they detect calls that differ when the
    states arrive."""
    with reporting_errors(transport) if compare else nullcontext():
        must_be_eager(q, k, v)
        ring, inputs = _ring(options, keys, transport, q, k, v)
    p = ring.problem
    compared = described(p, options.mask, options.bias)
    call = {"call": "decode", "layer": layer, **compared, "new tokens": p.Tq, "keys": keys}
    if compare:
        agree(transport, call, p.Tq, p.Tk)
    with transport.computing():
        mine = ring.state_after(0, inputs.q, Part(inputs.k, inputs.v), None) or no_keys(p, p.Tq)
        states, queries = _exchanged(
            transport, mine, inputs.q if compare else inputs.q[:, :0], call
        )
    _must_be_equal(queries)
    total = states[0]
    for state in states[1:]:
        total = merge(total, state)
    return p.shape_back(ring.finish(total)[0].to(p.dtype))


def _must_be_equal(queries: list[Tensor]) -> None:
    """Raise `BadValue` on every rank if the queries differ by more than the rounding of different
    processors."""
    for rank, q in enumerate(queries):
        far = (q - queries[0]).abs() > 0.01 * queries[0].abs().amax() if q.numel() else q.bool()
        if bool(far.any()):
            gave = f"The new queries of rank {rank} differ from those of rank 0."
            rule = "while decoding, every rank runs the model on the same new tokens."
            hint = "sample on one rank and broadcast the token, or use the same seed on every rank."
            raise BadValue(gave, rule, hint)


def _ring(
    options: Options, keys: Layout, transport: Transport, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Ring, Inputs]:
    if options.dropout or not (options.bias is None or isinstance(options.bias, Alibi)):
        gave = f"decode got {'dropout' if options.dropout else 'a bias tensor'}."
        hint = "call model.eval(), or use distributed.attention."
        raise BadValue(gave, "decode has no dropout, and its bias is ALiBi or None.", hint)
    rule = "keys= is the layout of all keys, because ranks may hold any numbers of them."
    hint = "pass for example distributed.contiguous(length, world)."
    must_be_of(Layout, "decode with keys=", keys, rule, hint)
    p, inputs = make_problem(q, k, v, options._replace(mask=None, bias=None))
    own = keys.positions[transport.rank] if keys.world == transport.world else ()
    if keys.world != transport.world or len(own) != p.Tk:
        rank = f"{transport.rank} of {transport.world}"
        gave = f"Rank {rank} has {p.Tk} keys, but {len(own)} by {keys!r}."
        hint = "pass the layout of the keys, including the tokens that were added since."
        raise BadValue(gave, "the layout lists the positions of each rank.", hint)
    grid = Grid(p.Tq, keys.length, p.B, p.H)
    check_on_all_positions(p, options.mask, options.bias, grid)
    queries = Layout([[range(p.Tq)]])
    mask = everything if options.mask is None else options.mask
    # This rank has all queries, but only its own keys.
    of_rank = Routes(mask, grid, 0, queries, keys, [keys.positions[transport.rank]], [])
    return Ring(p, options.bias, of_rank, transport, "decode"), inputs


def _exchanged(
    transport: Transport, mine: State, queries: Tensor, call: dict[str, object]
) -> tuple[list[State], list[Tensor]]:
    """Exchange states, and the queries of the first head; return those of all ranks. A digest of
    the call is sent too. If digests differ, all ranks compare their calls, which raises an
    error."""
    digest = hashlib.blake2b(written(call), digest_size=DIGEST_BYTES).digest()
    first = queries[:, :1].to(mine.max.dtype)
    tensors = [*mine.tensors(), first]
    numbers = torch.cat([x.reshape(-1) for x in tensors])
    head = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(numbers.device)
    sent = torch.cat([head, numbers.view(torch.uint8)])
    gathered = transport.all_gather(sent.to(transport.device))
    if any(not torch.equal(x[:DIGEST_BYTES].cpu(), head.cpu()) for x in gathered):
        agree(transport, call, 0, 0)
    sizes = [x.numel() for x in tensors]
    states, firsts = [], []
    for x in gathered:
        parts = x[DIGEST_BYTES:].clone().view(numbers.dtype).to(numbers.device).split(sizes)
        *shaped, first = (part.view_as(like) for part, like in zip(parts, tensors, strict=True))
        states.append(mine.with_tensors(iter(shaped)))
        firsts.append(first)
    return states, firsts


# ------------------------------------------------------------------------------ inside `sharded`


@dataclass(eq=False)
class Decoding(InBlock):
    """Decoding inside `sharded`: new tokens after a text that is spread over the ranks."""

    layout: Layout  # of the text
    group: Group
    timeout: float
    rank: int
    tokens_before: int
    block: OpenBlock
    compared: bool = False  # whether the ranks have compared their calls

    def layout_after(self, count: int) -> Layout:
        """Return the layout after `count` more new tokens."""
        first, world = self.layout.length, self.layout.world
        ranges = [list(of_rank) for of_rank in self.layout.ranges]
        end = self.tokens_before + count
        for turn, start in enumerate(range(first, end, TURN)):
            ranges[turn % world].append(range(start, min(start + TURN, end)))
        return Layout(ranges)

    def positions_from(self, start: int, count: int) -> Tensor:
        return torch.arange(self.tokens_before, self.tokens_before + count)

    def cached_part(self, x: Tensor) -> Tensor:
        return x[..., self._stores(self.tokens_before - self.layout.length, x.shape[-2]), :]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: Ambient
    ) -> Tensor:
        transport = GroupTransport(self.group, self.timeout)
        with reporting_errors(transport):
            positions = self.positions_from(0, q.shape[-2])
            layer = self.block.enter_call(positions, any_mask=False).layer
            must_be_computed_together(engine, around)
        keys = self.layout_after(q.shape[-2])
        mine, new = len(self.layout.positions[self.rank]), keys.length - self.layout.length
        if k.shape[-2] == mine + new:  # a cache that stores every new token
            own = torch.cat([torch.arange(mine), mine + self._stores(0, new).nonzero()[:, 0]])
            k, v = k[..., own.to(k.device), :], v[..., own.to(v.device), :]
        compare, self.compared = not self.compared, True
        return decode_step(transport, options, keys, q, k, v, compare, layer)

    def _stores(self, first: int, count: int) -> Tensor:
        """Return which of `count` new tokens this rank stores; number 0 follows the text."""
        return (torch.arange(first, first + count) // TURN) % self.layout.world == self.rank

    def must_be_one_text(self, ids: Tensor) -> None:
        pass  # new tokens belong to one text

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return `x`, which every rank has completely."""
        return x

    def statistics(self, *of_call: object) -> NoReturn:
        rule = "a step of decoding merges only the output over the ranks."
        hint = "watch the text itself inside distributed.sharded."
        raise BadValue("Statistics were requested while decoding.", rule, hint)

    rows = total = statistics


def must_be_computed_together(engine: str, around: Ambient) -> None:
    """Raise `BadValue` if an engine is named, or if the call is inside `intervene`."""
    if engine != "auto" or around.editors:
        gave = f"engine={engine!r} was passed" if engine != "auto" else "Calls are edited"
        rule = "the ranks compute a call together, without edits, and choose the engine."
        hint = "omit engine=, and intervene outside the block."
        raise BadValue(f"{gave} inside distributed.sharded.", rule, hint)
