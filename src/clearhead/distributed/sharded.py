"""Run a model on a text that is cut over the ranks of a group, by one setting."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.functional.ambient import Ambient, FollowedCall
from ..core.masks import Mask, everything, intersect
from ..core.problem.check import Options
from ..core.problem.problem import Inputs, Problem
from ..core.stats import Result, Statistic, parse_stats
from .attention import TIMEOUT, Call, agreed_ring, dim_of, gathered, must_be_eager, output
from .block import InBlock, OpenBlock
from .cut import routes
from .decode import Decoding, must_be_computed_together
from .handshake import agree, reporting_errors
from .layouts import Layout, layout_of
from .look import gather_statistics, must_merge_over_ranks, rows, shard_statistics
from .ring import Ring
from .transport import Group, GroupTransport, rank_and_world


@dataclass(frozen=True, eq=False)
class Shard(InBlock):
    """This rank's part of a text, as `sharded` yields it."""

    layout: Layout
    group: Group
    mask: Mask
    timeout: float
    rank: int
    heads: int = 1
    block: OpenBlock = field(default_factory=OpenBlock)

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens in the text, (t,). Pass them to a transformers model
        as ``position_ids=part.positions[None]``."""
        return self.layout.positions[self.rank].tensor()

    tokens_before = None

    def positions_from(self, start: int, count: int) -> Tensor:
        """Return the positions of this rank's tokens, after `start` others."""
        return self.positions + start

    def cached_part(self, x: Tensor) -> Tensor:
        """Return the tokens that this rank caches: all of its part."""
        return x

    def last(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return `x` at the last token of the text, with size 1 in `dim`, on every rank."""
        own = self.layout.positions[self.rank]
        has_last = len(own) > 0 and own.ranges[-1].stop == self.layout.length
        one = [1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)]
        end = x.narrow(dim, x.shape[dim] - 1, 1) if has_last else x.new_zeros(one)
        return self.total(end.detach(), "last")

    def decoding(self, length: int) -> AbstractContextManager[None]:
        """Decode inside the `with` block: every rank runs the model on the same new tokens after
        the first `length`, with its cache of its part of the text.

        >>> for n in range(100):  # doctest: +SKIP
        ...     with part.decoding(len(text) + n):
        ...         token = model(token[:, -1:], caches).argmax(-1)

        One rank stores the new keys and values, in turns of 256 tokens; a transformers
        ``DynamicCache()`` stores them on every rank. Pass the positions of the new tokens to a
        transformers model. A mask of sliding windows is over all positions, so the cache must not
        crop. Raises `BadValue` if a cache has another number of tokens.
        """
        step = Decoding(self.layout, self.group, self.timeout, self.rank, length, self.block)
        return step.computing()

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's positions of a tensor of the whole text, such as token ids (B, T)."""
        dim = dim_of("part.shard", x, dim)
        layout = layout_of(self.layout, x.shape[dim], self.layout.world)
        self.block.note_text(x)
        return layout.part(x, self.rank, dim)

    def inputs(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return what a transformers model of the next token gets, from the whole text, (B, T).

        >>> loss = model(**part.inputs(ids, labels=ids), use_cache=False).loss  # doctest: +SKIP

        With `labels`, -100 for none, a rank's loss is the sum over its tokens, divided by the
        number of labels in the whole text: the losses of the ranks add up to that of one process.
        """
        mine = {"input_ids": self.shard(ids), "position_ids": self.positions[None].to(ids.device)}
        if labels is None:
            return mine
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        mine |= {"labels": self.shard(labels), "shift_labels": self.shard(shifted)}
        return mine | {"num_items_in_batch": (shifted != -100).sum()}

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """Gather the whole text on every rank, as `distributed.unshard` does."""
        return gathered(GroupTransport(self.group, self.timeout), x, self.layout, dim)

    def total(self, x: Tensor, call: str = "total") -> Tensor:
        """Return the sum of a tensor over the ranks, on every rank."""
        transport = GroupTransport(self.group, self.timeout)
        agree(transport, {"call": call, "dtype": x.dtype, "sizes": str(list(x.shape))}, 0, 0)
        with transport.computing():
            return torch.stack(transport.all_gather(x.contiguous())).sum(0)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: Ambient
    ) -> Tensor:
        transport = GroupTransport(self.group, self.timeout)
        with reporting_errors(transport):
            must_be_eager(q, k, v)
            caller = self.block.enter_call(self.positions, self.mask is not everything)
            must_be_computed_together(engine, around)
        mask = everything if options.mask is None else options.mask
        options = options._replace(mask=intersect(mask, self.mask))
        call = Call(options, self.layout, heads=self.heads)
        ring, inputs = agreed_ring(transport, call, q, k, v, self.block.text, layer=caller.layer)
        with transport.computing():
            out = output(ring, inputs, self.heads)
        mask, grid = ring.routes.mask, ring.routes.grid
        full_problem = replace(
            ring.problem, Tq=grid.Tq, Tk=grid.Tk, mask=mask, bias=ring.bias, grad=False
        )
        for follower in around.followers:
            follower.begin(full_problem, inputs)
            follower.receive(FollowedCall(full_problem, inputs, out, inputs))
        return ring.problem.shape_back(out)

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
    ) -> dict[str, Result]:
        """Compute statistics of the whole text on every rank, from the inputs of each rank."""
        transport = GroupTransport(self.group, self.timeout)
        with reporting_errors(transport):
            parsed = parse_stats(statistics, problem.grid)
            must_merge_over_ranks(parsed)
        call: dict[str, object] = {"call": "statistics", "stats": parsed}
        agree(transport, call, inputs.q.shape[2], inputs.k.shape[2])
        own = replace(
            problem, Tq=inputs.q.shape[2], Tk=inputs.k.shape[2], mask=everything, bias=None
        )
        both = self.layout, self.layout
        with transport.computing():
            of_rank = routes(problem.mask, problem.grid, *both, transport.rank)
            ring = Ring(own, problem.bias, of_rank, transport, "statistics")
            own_results = shard_statistics(ring, inputs, parsed)
            return gather_statistics(ring, parsed, own_results)

    def rows(self, problem: Problem, inputs: Inputs, queries: Tensor) -> Tensor:
        """Compute the exact weights of some queries on all keys, on every rank."""
        transport = GroupTransport(self.group, self.timeout)
        return rows(transport, self.layout.positions[self.rank], problem, inputs, queries)

    def must_be_one_text(self, ids: Tensor) -> None:
        """Raise `BadValue` if the documents of `ids` change inside a range of this rank, without a
        mask."""
        gaps = self.positions.diff() != 1
        changes = ids.diff(dim=-1).cpu() != 0
        if self.mask is everything and not bool((changes == gaps).all()):
            gave = "The positions start again inside this rank's part of the text."
            rule = "packed texts need a mask over all positions, since a rank sees only its part."
            hint = "pass mask=documents(ids) to sharded, with the ids of the whole text."
            raise BadValue(gave, rule, hint)


@contextmanager
def sharded(
    length: int,
    group: Group = None,
    *,
    layout: Layout | str = "contiguous",
    heads: int = 1,
    mask: Mask | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Shard]:
    """Cut a text over ranks: inside the `with` block, all calls of attention are of this text.

    >>> with ch.distributed.sharded(len(ids[0]), layout="head-tail") as part:  # doctest: +SKIP
    ...     logits = model(part.shard(ids), position_ids=part.positions[None]).logits
    ...     loss = cross_entropy(logits.flatten(0, 1), part.shard(labels).flatten())

    Layers of `clearhead.nn`, transformers models with ``attn_implementation="clearhead"`` and plain
    calls of `clearhead.attention` pass shards, and get the output of their own queries. Masks that
    a model creates itself, causal or windows, are over the positions of the whole text. Rotary and
    sinusoidal positions of `clearhead.nn` are those of the rank's tokens; pass the positions to a
    transformers model. A parameter's gradient on a rank comes from that rank's tokens: sum it over
    the ranks, as data parallel training does. Backward may run inside the block or after it, in any
    thread, and so may the activation checkpoints that it recomputes. The graphs of a compiled model
    break at attention.

    Every rank enters the block, makes the same calls in it, and leaves it; the ranks compare this
    at the end. Another thread computes calls of the block if it runs in a copy of the context.
    `docs/distributed.md` lists what is not supported.

    Args:
        length: the number of tokens of the whole text.
        group, layout, heads: as in `attention`.
        mask: a mask over all positions besides the model's own, such as `documents(ids)` for packed
            texts; None means no other mask.
        timeout: seconds that a rank waits for another.

    Yields this rank's part as `part`: `part.positions`, `part.shard(x)`, `part.unshard(x)`.

    Raises:
        BadValue, BadType: for a layout that does not fit. Inside the block: for errors of
            `attention`, padding masks, masks that are not a rule over positions, `look`, `matrix`
            and `explain`, ``torch.compile(..., fullgraph=True)``, a thread with another context,
            labels, and a transformers model without position_ids. At the end: for a block without
            attention calls. On every rank: if another rank raised an error or left the block.

    `watch(model)` and `report(model, ...)` inside the block return the numbers of the whole text on
    every rank.
    """
    rank, world = rank_and_world(group)
    rule = everything if mask is None else mask
    part = Shard(layout_of(layout, length, world), group, rule, timeout, rank, heads)
    part.block.frame = sys._getframe(2)  # the frame of the `with` statement, above contextlib's
    with part.computing(), part.block.compared(group, timeout):
        yield part
