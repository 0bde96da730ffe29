"""Compute attention around a ring of ranks: communication overlaps with computation.

In step t, rank r computes over the keys of rank r - t, and sends its own keys to rank r + t. The
exchange for a step starts before the previous step computes, so the two overlap, and a rank stores
at most two shards of other ranks. Only keys that the mask allows for some query of the receiver are
sent.

    forward    each part yields a mergeable softmax state; states are merged in the order of steps
    backward   the keys are sent again. From the output and log-sum-exp of its queries, each rank
               computes the gradients of the keys that it received, and sends them to the rank of
               the keys, which adds them in the order of steps.

Source: Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise Transformers".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.masks import Everything
from ..core.masks.values import shared_offset
from ..core.problem import online_softmax
from ..core.problem.biases import Alibi, Bias, TensorBias
from ..core.problem.check import Options, make_problem
from ..core.problem.online_softmax import State
from ..core.problem.problem import Inputs, Problem
from . import local
from .cut import Cut, Routes
from .layouts import Positions
from .local import BlockAlibi, BlockDropout, Gradients, QueryOutputs
from .transport import Transport, Work

LONG = 256  # positions of a range that is computed as a problem of its own


class Part(NamedTuple):
    """Keys and values that one rank sends to another."""

    k: Tensor
    v: Tensor


class Block(NamedTuple):
    """Some of this rank's queries over some of the keys of a part: a problem of its own."""

    queries: slice
    keys: slice
    problem: Problem
    inputs: Inputs
    dropped: BlockDropout | None
    at: Positions  # of the queries
    on: Positions  # of the keys


@dataclass(frozen=True, eq=False)
class Ring:
    """One rank's part of a call over the ranks of a group.

    `problem` is the problem of this rank's queries and keys, without mask and bias. `routes` holds
    the mask over all positions. `bias` is ALiBi over all positions, or a tensor with the rows of
    this rank's queries for all keys.
    """

    problem: Problem
    bias: Bias | None
    routes: Routes
    transport: Transport
    name: str  # of the call, the same on all ranks
    first_head: int = 0  # the number of the first head, for dropout by seed

    @property
    def by_range(self) -> bool:
        """Whether each range of positions is a problem of its own. Then ALiBi is only shifted,
        which every engine supports. With many short ranges there would be too many problems."""
        return isinstance(self.bias, Alibi) and all(
            len(layout.ends[0]) <= max(2 * layout.world, layout.length // LONG)
            for layout in (self.routes.queries, self.routes.keys)
        )

    # ------------------------------------------------------------------------------- communication

    def parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Part]]:
        """Yield each rank and its keys and values, step by step. The next part is received
        meanwhile."""
        rank, world = self.transport.rank, self.transport.world
        pending = None
        for step in range(world):
            if step == 0:
                own = self.routes.received[rank].among(self.routes.keys.positions[rank])
                part = Part(own.cut(k, 2), own.cut(v, 2))
            else:
                assert pending is not None
                part = pending.wait()
            if step + 1 < world:
                pending = self._start_exchange(step + 1, k, v)
            yield (rank - step) % world, part

    def _start_exchange(self, step: int, k: Tensor, v: Tensor) -> "PendingPart":
        rank, world, r = self.transport.rank, self.transport.world, self.routes
        to, source = (rank + step) % world, (rank - step) % world
        sent = r.sent[to].among(r.keys.positions[rank])
        part = Part(sent.cut(k, 2), sent.cut(v, 2))
        return PendingPart(self.transport, to, part, source, len(r.received[source]))

    # --------------------------------------------------------------------------------- computation

    def blocks(self, owner: int, q: Tensor, part: Part) -> Iterator[Block]:
        """Yield the problems of this rank's queries over a part."""
        cut = self.routes.cuts[owner]
        if not (len(cut.queries) and len(cut.keys)):
            return
        for (at, queries), (on, keys) in product(
            pieces(cut.queries, self.by_range), pieces(cut.keys, self.by_range)
        ):
            inputs = Inputs(q[:, :, queries], part.k[:, :, keys], part.v[:, :, keys])
            mask = cut if (at, on) == (cut.queries, cut.keys) else Cut(cut.mask, cut.grid, at, on)
            rule = None if isinstance(cut.mask, Everything) else mask
            bias, p = self.bias_of(queries, at, on), self.problem
            key = (*(x.shape for x in inputs), p.dtype, p.device, p.scale, p.softcap)
            known = cut.problems if bias is None and not torch.is_inference_mode_enabled() else {}
            if key not in known:
                known[key], _ = make_problem(*inputs, Options(rule, bias, p.scale, p.softcap))
            yield Block(queries, keys, known[key], inputs, self.dropped(at, on), at, on)

    def bias_of(self, queries: slice, at: Positions, on: Positions) -> Bias | None:
        if isinstance(self.bias, Alibi) and not self.by_range:
            device = self.problem.device
            return BlockAlibi(self.bias, self.routes.grid, at.tensor(device), on.tensor(device))
        if isinstance(self.bias, Alibi):
            first = shared_offset(self.bias.align, self.routes.grid)
            offset = self.bias.align if first is None else first
            return Alibi(self.bias.slopes, offset + at.start - on.start)  # type: ignore[operator]
        if isinstance(self.bias, TensorBias):
            x = self.bias.as_4d()
            x = x if x.shape[2] == 1 else x[:, :, queries]
            return TensorBias(x if x.shape[3] == 1 else on.cut(x, 3))
        return None

    def dropped(self, at: Positions, on: Positions) -> BlockDropout | None:
        if not self.problem.dropout:
            return None
        assert self.problem.seed is not None
        device = self.problem.device
        positions = at.tensor(device), on.tensor(device), self.first_head
        return BlockDropout(self.problem.dropout, self.problem.seed, *positions)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output of this rank's queries, in float32 or wider, and their log-sum-exp, in
        float64."""
        state: State | None = None
        for owner, part in self.parts(k, v):
            state = self.state_after(owner, q, part, state)
        return self.finish(state or local.no_keys(self.problem, q.shape[2]))

    def state_after(self, owner: int, q: Tensor, part: Part, state: State | None) -> State | None:
        """Return the state of this rank's queries after one more part; None if no key was seen."""
        p = self.problem
        for block in self.blocks(owner, q, part):
            computed = local.attend(block.problem, block.inputs, block.dropped)
            if state is None and computed.max.shape[2] == q.shape[2]:
                state = computed
            else:
                state = _merged(state or local.no_keys(p, q.shape[2]), computed, block.queries)
        return state

    def finish(self, state: State) -> tuple[Tensor, Tensor]:
        """Compute the output and the log-sum-exp from the state after all keys."""
        sinks = self.problem.sinks
        lse = local.lse_of(online_softmax.with_sinks(state, sinks))
        return online_softmax.finish(state, sinks), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, outputs: QueryOutputs, bias_grad: bool
    ) -> Gradients:
        """Compute this rank's gradients: of its keys and values, from the queries of all ranks."""
        p, world, rank = self.problem, self.transport.world, self.transport.rank
        dq, dk, dv = (torch.zeros_like(x, dtype=p.wide) for x in (q, k, v))
        dbias = _no_bias_gradient(self.bias, p) if bias_grad else None
        returning: PendingPart | None = None
        for step, (owner, part) in enumerate(self.parts(k, v)):
            dpart = Part(*(torch.zeros_like(x, dtype=p.wide) for x in part))
            for block in self.blocks(owner, q, part):
                of_block = QueryOutputs(*(x[:, :, block.queries] for x in outputs))
                grads = local.gradients(
                    block.problem, block.inputs, of_block, bias_grad, block.dropped
                )
                dq[:, :, block.queries] += grads.q
                dpart.k[:, :, block.keys] += grads.k
                dpart.v[:, :, block.keys] += grads.v
                if dbias is not None and grads.bias is not None:
                    self.add_bias(dbias, grads.bias, owner, block)
            if step == 0:
                self.add(rank, dk, dv, dpart)
                continue
            if returning is not None:
                self.add((rank + step - 1) % world, dk, dv, returning.wait())
            source = (rank + step) % world
            count = len(self.routes.sent[source])
            returning = PendingPart(self.transport, owner, dpart, source, count)
        if returning is not None:
            self.add((rank - 1) % world, dk, dv, returning.wait())
        dsinks = None
        if p.sinks is not None:
            weight = torch.exp(p.sinks.double().reshape(1, -1, 1) - outputs.lse)
            weight = weight.masked_fill(outputs.lse == -torch.inf, 0.0)
            dsinks = -(weight * (outputs.dout * outputs.out).sum(-1).double()).sum((0, 2))
        return Gradients(dq, dk, dv, dbias, dsinks)

    def add(self, rank: int, dk: Tensor, dv: Tensor, part: Part) -> None:
        """Add the gradients of this rank's keys and values that come from the queries of `rank`."""
        self.add_to(rank, dk, part.k)
        self.add_to(rank, dv, part.v)

    def add_to(self, rank: int, total: Tensor, part: Tensor) -> None:
        """Add to `total`, (B, heads, k, ...), of this rank's keys, a tensor of the keys that the
        queries of `rank` may look at."""
        sent = self.routes.sent[rank].among(self.routes.keys.positions[self.transport.rank])
        if sent.contiguous:
            total.narrow(2, sent.start, len(sent)).add_(part)
        else:
            total.index_add_(2, sent.tensor(total.device), part)

    def add_bias(self, dbias: Tensor, of_block: Tensor, owner: int, block: Block) -> None:
        """Add the gradient of a block to that of the bias."""
        if dbias.dim() == 1:  # ALiBi's slopes
            dbias += of_block
            return
        at = dbias if dbias.shape[2] == 1 else dbias[:, :, block.queries]
        of_block = of_block.to(at.dtype)
        if at.shape[3] == 1:
            at += of_block
        else:
            at.index_add_(3, self.routes.received[owner].tensor(at.device)[block.keys], of_block)


class PendingPart:
    """A part of `count` keys that is being received as one message, while another is sent."""

    def __init__(self, transport: Transport, to: int, sent: Part, source: int, count: int) -> None:
        self.shapes = [torch.Size((*x.shape[:2], count, *x.shape[3:])) for x in sent]
        self.outgoing = torch.cat([x.flatten() for x in sent])  # which must live until it is sent
        self.buffer = self.outgoing.new_empty(sum(shape.numel() for shape in self.shapes))
        mail = [(to, self.outgoing)], [(source, self.buffer)]
        self.work: Work = transport.batch_isend_irecv(*mail)

    def wait(self) -> Part:
        self.work.wait()
        parts = self.buffer.split([shape.numel() for shape in self.shapes])
        return Part(*(x.view(shape) for x, shape in zip(parts, self.shapes, strict=True)))


def pieces(positions: Positions, by_range: bool) -> list[tuple[Positions, slice]]:
    """Split positions into ranges, each with its slice of their list; or return them unsplit."""
    if not by_range or positions.contiguous:
        return [(positions, slice(0, len(positions)))]
    ends = [0, *accumulate(map(len, positions.ranges))]
    slices = map(slice, ends[:-1], ends[1:])
    return [(Positions((r,)), part) for r, part in zip(positions.ranges, slices, strict=True)]


def _merged(state: State, computed: State, queries: slice) -> State:
    """Merge the state of some queries into that of all."""
    if queries == slice(0, state.max.shape[2]):
        return online_softmax.merge(state, computed)
    merged = online_softmax.merge(state.map(lambda x: x[:, :, queries]), computed)
    for total, part in zip(state.tensors(), merged.tensors(), strict=True):
        total[:, :, queries] = part
    return state


def _no_bias_gradient(bias: Bias | None, p: Problem) -> Tensor | None:
    if isinstance(bias, TensorBias):
        return torch.zeros_like(bias.as_4d(), dtype=p.wide)
    if isinstance(bias, Alibi):
        return torch.zeros(p.H, dtype=p.wide, device=p.device)
    return None
