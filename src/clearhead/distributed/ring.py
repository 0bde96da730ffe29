"""The ring: keys and values travel while the local engine works on those that are there.

In step t, rank r works on the keys of rank r - t, and rank r + t gets its own. What arrives in a
step was posted before the step in front of it began to compute, so sending and computing overlap,
and no more than two shards of other ranks are held. Only those keys travel that the mask leaves to
some query of the receiver.

    forward    each part gives a state of the mergeable softmax; they merge in the order of steps
    backward   the keys travel again. Each rank knows the output and log-sum-exp of its queries, so
               it finds the gradients of the keys that are there and sends them back to their rank,
               which adds them in the order of steps.

Source: Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise Transformers".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import Everything
from ..masks.values import shared_offset
from ..problem import online_softmax
from ..problem.biases import Alibi, Bias, TensorBias
from ..problem.check import Options, make_problem
from ..problem.online_softmax import State
from ..problem.problem import Inputs, Problem
from . import local
from .cut import Cut, Routes
from .layouts import Positions
from .local import Dropped, Finished, PlacedAlibi
from .transport import Transport, Work

LONG = 256  # positions of a range that is worth a problem of its own


class Part(NamedTuple):
    """Keys and values of one rank, those that it sends."""

    k: Tensor
    v: Tensor


class Block(NamedTuple):
    """Some of the queries here on some of the keys of a part: a problem of its own."""

    queries: slice
    keys: slice
    problem: Problem
    inputs: Inputs
    dropped: Dropped | None
    at: Positions  # of the queries
    on: Positions  # of the keys


@dataclass(frozen=True, eq=False)
class Ring:
    """One call over the ranks of a group, as one of them sees it.

    `problem` is that of its own queries and its own keys, but for the mask and ALiBi, which
    stand in `routes` and `bias` and speak of all positions; a bias of numbers holds the rows of the
    queries here, for all keys.
    """

    problem: Problem
    bias: Bias | None
    routes: Routes
    transport: Transport
    name: str  # of the call, the same on all ranks
    first_head: int = 0  # dropout by seed counts heads from here

    @property
    def by_range(self) -> bool:
        """Is each range of positions a problem of its own? Then ALiBi is shifted, as every engine
        can; among many short ranges there would be too many problems."""
        return isinstance(self.bias, Alibi) and all(
            len(layout.ends[0]) <= max(2 * layout.world, layout.length // LONG)
            for layout in (self.routes.queries, self.routes.keys)
        )

    # --------------------------------------------------------------------------------- what travels

    def parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Part]]:
        """(rank, its keys and values), step by step; the next ones are on their way meanwhile."""
        here, world = self.transport.rank, self.transport.world
        coming = None
        for step in range(world):
            if step == 0:
                held = self.routes.received[here].among(self.routes.keys.held[here])
                part = Part(held.cut(k, 2), held.cut(v, 2))
            else:
                assert coming is not None
                part = coming.wait()
            if step + 1 < world:
                coming = self.send_and_expect(step + 1, k, v)
            yield (here - step) % world, part

    def send_and_expect(self, step: int, k: Tensor, v: Tensor) -> "Coming":
        here, world, r = self.transport.rank, self.transport.world, self.routes
        to, source = (here + step) % world, (here - step) % world
        held = r.sent[to].among(r.keys.held[here])
        out = torch.cat([held.cut(k, 2).flatten(), held.cut(v, 2).flatten()])
        n = len(r.received[source])
        shapes = (*k.shape[:2], n, k.shape[3]), (*v.shape[:2], n, v.shape[3])
        return Coming(self.transport, [(to, out)], source, shapes, k)

    # ----------------------------------------------------------------------------- what is computed

    def blocks(self, owner: int, q: Tensor, part: Part) -> Iterator[Block]:
        """The problems whose outputs are those of the queries here on a part."""
        cut = self.routes.cuts[owner]
        if not (len(cut.queries) and len(cut.keys)):
            return
        for (at, queries), (on, keys) in product(
            pieces(cut.queries, self.by_range), pieces(cut.keys, self.by_range)
        ):
            inputs = Inputs(q[:, :, queries], part.k[:, :, keys], part.v[:, :, keys])
            mask = cut if (at, on) == (cut.queries, cut.keys) else Cut(cut.mask, cut.grid, at, on)
            problem, _ = make_problem(
                *inputs,
                Options(
                    mask=None if isinstance(cut.mask, Everything) else mask,
                    bias=self.bias_of(queries, at, on),
                    scale=self.problem.scale,
                    softcap=self.problem.softcap,
                ),
            )
            yield Block(queries, keys, problem, inputs, self.dropped(at, on), at, on)

    def bias_of(self, queries: slice, at: Positions, on: Positions) -> Bias | None:
        if isinstance(self.bias, Alibi) and not self.by_range:
            device = self.problem.device
            return PlacedAlibi(self.bias, self.routes.grid, at.tensor(device), on.tensor(device))
        if isinstance(self.bias, Alibi):
            first = shared_offset(self.bias.align, self.routes.grid)
            place = self.bias.align if first is None else first
            return Alibi(self.bias.slopes, place + at.start - on.start)  # type: ignore[operator]
        if isinstance(self.bias, TensorBias):
            x = self.bias.as_4d()
            x = x if x.shape[2] == 1 else x[:, :, queries]
            return TensorBias(x if x.shape[3] == 1 else on.cut(x, 3))
        return None

    def dropped(self, at: Positions, on: Positions) -> Dropped | None:
        if not self.problem.dropout:
            return None
        assert self.problem.seed is not None
        device = self.problem.device
        where = at.tensor(device), on.tensor(device), self.first_head
        return Dropped(self.problem.dropout, self.problem.seed, *where)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output in float32 or wider, and the log-sum-exp in float64, of the queries here."""
        state: State | None = None
        for owner, part in self.parts(k, v):
            state = self.state_after(owner, q, part, state)
        return self.finish(state or local.no_keys(self.problem, q.shape[2]))

    def state_after(self, owner: int, q: Tensor, part: Part, state: State | None) -> State | None:
        """The state of the queries here after one more part; None after no key at all."""
        p = self.problem
        for block in self.blocks(owner, q, part):
            found = local.attend(block.problem, block.inputs, block.dropped)
            if state is None and found.max.shape[2] == q.shape[2]:
                state = found
            else:
                state = _merged(state or local.no_keys(p, q.shape[2]), found, block.queries)
        return state

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of queries that have seen all their keys."""
        sinks = self.problem.sinks
        lse = local.lse_of(online_softmax.with_sinks(state, sinks))
        return online_softmax.finish(state, sinks), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, finished: Finished, learn_bias: bool
    ) -> "Gradients":
        p, world, here = self.problem, self.transport.world, self.transport.rank
        dq, dk, dv = (torch.zeros_like(x, dtype=p.wide) for x in (q, k, v))
        dbias = _no_bias_gradient(self.bias, p) if learn_bias else None
        returning: Coming | None = None
        for step, (owner, part) in enumerate(self.parts(k, v)):
            dpart = Part(*(torch.zeros_like(x, dtype=p.wide) for x in part))
            for block in self.blocks(owner, q, part):
                seen = Finished(*(x[:, :, block.queries] for x in finished))
                found = local.gradients(
                    block.problem, block.inputs, seen, learn_bias, block.dropped
                )
                dq[:, :, block.queries] += found.q
                dpart.k[:, :, block.keys] += found.k
                dpart.v[:, :, block.keys] += found.v
                if dbias is not None and found.bias is not None:
                    self.add_bias(dbias, found.bias, owner, block)
            if step == 0:
                self.add(here, dk, dv, dpart)
                continue
            if returning is not None:
                self.add((here + step - 1) % world, dk, dv, returning.wait())
            back = torch.cat([dpart.k.flatten(), dpart.v.flatten()])
            source = (here + step) % world
            n = len(self.routes.sent[source])
            shapes = (*k.shape[:2], n, k.shape[3]), (*v.shape[:2], n, v.shape[3])
            returning = Coming(self.transport, [(owner, back)], source, shapes, dk)
        if returning is not None:
            self.add((here - 1) % world, dk, dv, returning.wait())
        dsinks = None
        if p.sinks is not None:
            taken = torch.exp(p.sinks.double().reshape(1, -1, 1) - finished.lse)
            taken = taken.masked_fill(finished.lse == -torch.inf, 0.0)
            dsinks = -(taken * (finished.dout * finished.out).sum(-1).double()).sum((0, 2))
        return Gradients(dq, dk, dv, dbias, dsinks)

    def add(self, rank: int, dk: Tensor, dv: Tensor, part: Part) -> None:
        """Add what the queries of a rank teach the keys here."""
        self.add_to(rank, dk, part.k)
        self.add_to(rank, dv, part.v)

    def add_to(self, rank: int, total: Tensor, part: Tensor) -> None:
        """Add to a tensor (B, heads, k, ...) of the keys here what came of those that the queries
        of a rank may look at."""
        held = self.routes.sent[rank].among(self.routes.keys.held[self.transport.rank])
        if held.contiguous:
            total.narrow(2, held.start, len(held)).add_(part)
        else:
            total.index_add_(2, held.tensor(total.device), part)

    def add_bias(self, dbias: Tensor, found: Tensor, owner: int, block: Block) -> None:
        if dbias.dim() == 1:  # ALiBi's slopes
            dbias += found
            return
        at = dbias if dbias.shape[2] == 1 else dbias[:, :, block.queries]
        found = found.to(at.dtype)
        if at.shape[3] == 1:
            at += found
        else:
            at.index_add_(3, self.routes.received[owner].tensor(at.device)[block.keys], found)


class Gradients(NamedTuple):
    """Of the queries, keys and values here, in float32 or wider; what this rank's queries teach the
    bias and the sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


class Coming:
    """Two tensors that come as one message, while another is sent."""

    def __init__(
        self,
        transport: Transport,
        outgoing: list[tuple[int, Tensor]],
        source: int,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        like: Tensor,
    ) -> None:
        self.shapes, self.outgoing = shapes, outgoing  # which is kept until it is sent
        size = sum(torch.Size(s).numel() for s in shapes)
        self.buffer = like.new_empty(size)
        self.work: Work = transport.batch_isend_irecv(outgoing, [(source, self.buffer)])

    def wait(self) -> Part:
        self.work.wait()
        first, second = self.shapes
        n = torch.Size(first).numel()
        return Part(self.buffer[:n].view(first), self.buffer[n:].view(second))


def pieces(held: Positions, by_range: bool) -> list[tuple[Positions, slice]]:
    """Positions with the place they have in their list: all of them, or range by range."""
    if not by_range or held.contiguous:
        return [(held, slice(0, len(held)))]
    ends = [0, *accumulate(map(len, held.ranges))]
    places = map(slice, ends[:-1], ends[1:])
    return [(Positions((r,)), place) for r, place in zip(held.ranges, places, strict=True)]


def _merged(state: State, found: State, queries: slice) -> State:
    """The state of all queries here, once what was found for some of them is in it."""
    if queries == slice(0, state.max.shape[2]):
        return online_softmax.merge(state, found)
    merged = online_softmax.merge(state.map(lambda x: x[:, :, queries]), found)
    for total, part in zip(state.tensors(), merged.tensors(), strict=True):
        total[:, :, queries] = part
    return state


def _no_bias_gradient(bias: Bias | None, p: Problem) -> Tensor | None:
    if isinstance(bias, TensorBias):
        return torch.zeros_like(bias.as_4d(), dtype=p.wide)
    if isinstance(bias, Alibi):
        return torch.zeros(p.H, dtype=p.wide, device=p.device)
    return None
