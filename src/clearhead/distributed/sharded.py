"""A model whose text is cut over the ranks of a group, by one setting."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import BadValue
from ..functional.ambient import Ambient, computed_by
from ..masks import Mask, everything, intersect
from ..problem.check import Options
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistic, parse_stats
from .attention import TIMEOUT, Call, agreed, gathered, must_be_eager, output
from .block import Block
from .cut import routes
from .decode import Decoding, must_be_answered_together
from .handshake import agree, telling_others
from .layouts import Layout, layout_of
from .look import counted, masses, must_be_counted, whole
from .ring import Ring
from .transport import Group, GroupTransport, rank_and_world


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of a text, as `sharded` gives it."""

    layout: Layout
    group: Group
    mask: Mask
    timeout: float
    rank: int
    heads: int = 1
    block: Block = field(default_factory=Block)

    @property
    def positions(self) -> Tensor:
        """Where the tokens of this rank stand in the text, (t,): what a transformers model is
        passed as ``position_ids=part.positions[None]``."""
        return self.layout.held[self.rank].tensor()

    tokens_before = None

    def positions_from(self, start: int, count: int) -> Tensor:
        """The positions of this rank's tokens, after `start` others."""
        return self.positions + start

    def cached_part(self, x: Tensor) -> Tensor:
        """Every token of this rank's part stays here."""
        return x

    def last(self, x: Tensor, dim: int = -2) -> Tensor:
        """`x` at the last token of the text, one long in `dim`, on every rank."""
        held = self.layout.held[self.rank]
        here = len(held) > 0 and held.ranges[-1].stop == self.layout.length
        end = x.narrow(dim, x.shape[dim] - 1, 1) if here else x.new_zeros(_one(x, dim))
        transport = GroupTransport(self.group, self.timeout)
        agree(transport, {"call": "last", "dtype": x.dtype, "sizes": str(_one(x, dim))}, 0, 0)
        with transport.answering():
            return torch.stack(transport.all_gather(end.detach().contiguous())).sum(0)

    def decoding(self, length: int) -> AbstractContextManager[None]:
        """Inside the `with` block every rank runs the model on the same new tokens, the ones after
        the first `length`, with the caches that each of them filled with its part of the text.

        >>> for n in range(100):  # doctest: +SKIP
        ...     with here.decoding(len(text) + n):
        ...         token = model(token[:, -1:], caches).argmax(-1)

        New keys and values are kept on one rank, in turns of 256 tokens; a transformers
        ``DynamicCache()`` keeps the new ones on every rank. A transformers model is passed the
        positions of the new tokens, and a mask of sliding windows is over all positions, so the
        cache must not crop. Raises `BadValue` where a cache holds another number of tokens.
        """
        step = Decoding(self.layout, self.group, self.timeout, self.rank, length, self.block)
        return computed_by(step)

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's positions of a tensor that holds the whole text, such as token ids (B, T)."""
        held = layout_of(self.layout, x.shape[dim], self.layout.world).held[self.rank]
        self.block.note_text(x)
        return held.cut(x, dim)

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """The whole text on every rank, from the parts; as `distributed.unshard`."""
        return gathered(GroupTransport(self.group, self.timeout), x, self.layout, dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: Ambient
    ) -> Tensor:
        must_be_eager(q, k, v)
        transport = GroupTransport(self.group, self.timeout)
        with telling_others(transport):
            caller = self.block.enter_call(self.positions, self.mask is not everything)
            must_be_answered_together(engine, around)
        mask = everything if options.mask is None else options.mask
        options = options._replace(mask=intersect(mask, self.mask))
        call = Call(options, self.layout, heads=self.heads)
        ring, inputs = agreed(transport, call, q, k, v, self.block.text, layer=caller.layer)
        with transport.answering():
            out = output(ring, inputs, self.heads)
        self.block.note_checkpoints(caller, out)
        found, grid = ring.routes, ring.routes.grid
        every = replace(
            ring.problem, Tq=grid.Tq, Tk=grid.Tk, mask=found.mask, bias=ring.bias, grad=False
        )
        for on_call in around.listeners:
            on_call(every, inputs, out)
        return ring.problem.shape_back(out)

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
    ) -> dict[str, Result]:
        """Statistics of a call of the whole text, given the inputs of this rank, on every rank."""
        parsed = parse_stats(statistics, problem.grid)
        transport = GroupTransport(self.group, self.timeout)
        with telling_others(transport):
            must_be_counted(parsed)
        call: dict[str, object] = {"call": "statistics", "stats": parsed}
        agree(transport, call, inputs.q.shape[2], inputs.k.shape[2])
        here = replace(
            problem, Tq=inputs.q.shape[2], Tk=inputs.k.shape[2], mask=everything, bias=None
        )
        both = self.layout, self.layout
        with transport.answering():
            found = routes(problem.mask, problem.grid, *both, transport.rank)
            ring = Ring(here, problem.bias, found, transport, "statistics")
            return whole(ring, counted(ring, inputs, parsed))

    def masses(
        self, problem: Problem, inputs: Inputs, queries: Tensor, cells: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The weight of some queries on groups of keys, on every rank."""
        transport, held = GroupTransport(self.group, self.timeout), self.layout.held[self.rank]
        return masses(transport, held, problem, inputs, queries, cells)

    def refuse(self, error: BadValue) -> BadValue:
        self.block.refused = error
        return error

    def must_be_one_text(self, ids: Tensor) -> None:
        begins = self.positions.diff() != 1
        found = ids.diff(dim=-1).cpu() != 0
        if self.mask is everything and not bool((found == begins).all()):
            raise BadValue(
                "The positions begin anew inside of this rank's part of the text.",
                "the rank sees its part alone, so packed texts are told by a rule over all "
                "positions.",
                "pass mask=documents(ids) to sharded, with the ids of the whole text.",
            )


def _one(x: Tensor, dim: int) -> list[int]:
    sizes = list(x.shape)
    sizes[dim] = 1
    return sizes


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
    """Inside the `with` block every call of attention is of a text that is cut over ranks.

    >>> with ch.distributed.sharded(len(ids[0]), layout="head-tail") as part:  # doctest: +SKIP
    ...     logits = model(part.shard(ids), position_ids=part.positions[None]).logits
    ...     loss = cross_entropy(logits.flatten(0, 1), part.shard(labels).flatten())

    Layers of `clearhead.nn`, transformers models with ``attn_implementation="clearhead"`` and plain
    calls of `clearhead.attention` then pass shards and get the output of their own queries. Rules
    that a model makes itself, causal or windows, are over the positions of the whole text. Rotary
    and sinusoidal positions of `clearhead.nn` are those of the rank's tokens; a transformers model
    is passed them. What a weight learns on a rank comes from the rank's tokens: add it up over the
    ranks, as data parallel training does. Backward may come after the block, but for activation
    checkpoints, which make attention calls again.

    Every rank enters the block, makes the same calls in it, from the thread that entered it, and
    leaves it; the ranks compare that at the end. `docs/distributed.md` says what is refused.

    Args:
        length: how many tokens the whole text has.
        group, layout, heads: as in `attention`.
        mask: who may look at whom besides what the model says, over all positions, such as
            `documents(ids)` for packed texts; None means no further rule.
        timeout: seconds that a rank waits for another.

    Gives this rank's part as `part`: `part.positions`, `part.shard(x)`, `part.unshard(x)`.

    Raises:
        BadValue, BadType: a layout that does not fit; inside, what `attention` refuses, masks that
            a model pads or that are no rule over positions, `look`, `matrix` and `explain`, a
            compiled model, another thread, labels, a model of transformers without position_ids;
            at the end, a block without attention calls or with checkpoints that backward has not
            computed again; on every rank, where another one refused a call or left the block.

    `watch(model)` and `report(model, ...)` inside of it give every rank the numbers of the whole
    text.
    """
    rank, world = rank_and_world(group)
    rule = everything if mask is None else mask
    here = Shard(layout_of(layout, length, world), group, rule, timeout, rank, heads)
    here.block.frame = sys._getframe(2)  # of the `with` statement, above contextlib's
    with computed_by(here), here.block.compared(group, timeout):
        yield here
