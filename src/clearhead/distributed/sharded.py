"""A model whose text is cut over the ranks of a group, by one setting."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ..api.hooks import computed_by, editors
from ..errors import BadValue
from ..masks import Mask, everything, intersect
from ..problem.check import Options
from .attention import TIMEOUT, Question, answer, gathered
from .layouts import Layout, layout_of
from .transport import Group, GroupTransport


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of a text, as `sharded` gives it."""

    layout: Layout
    group: Group
    mask: Mask
    timeout: float
    rank: int

    @property
    def positions(self) -> Tensor:
        """Where the tokens of this rank stand in the text, (t,): what a transformers model is
        passed as ``position_ids=here.positions[None]``."""
        return self.layout.held[self.rank].tensor()

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's positions of a tensor that holds the whole text, such as token ids (B, T)."""
        return layout_of(self.layout, x.shape[dim], self.layout.world).held[self.rank].cut(x, dim)

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """The whole text on every rank, from the parts; as `distributed.unshard`."""
        return gathered(GroupTransport(self.group, self.timeout), x, self.layout, dim)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str) -> Tensor:
        if engine != "auto" or editors():
            gave = f"engine={engine!r} was asked for" if engine != "auto" else "Calls are edited"
            raise BadValue(
                f"{gave} inside of distributed.sharded.",
                "there the ranks answer together, each with the engine that can.",
                "leave engine= out, and intervene outside of it.",
            )
        mask = everything if options.mask is None else options.mask
        question = Question(
            **options._replace(mask=intersect(mask, self.mask))._asdict(),
            layout=self.layout,
        )
        return answer(GroupTransport(self.group, self.timeout), question, q, k, v)

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


@contextmanager
def sharded(
    length: int,
    group: Group = None,
    *,
    layout: Layout | str = "contiguous",
    mask: Mask | None = None,
    timeout: float = TIMEOUT,
) -> Iterator[Shard]:
    """Inside the `with` block every call of attention is of a text that is cut over ranks.

    >>> with ch.distributed.sharded(len(ids[0]), layout="head-tail") as here:  # doctest: +SKIP
    ...     logits = model(here.shard(ids), position_ids=here.positions[None]).logits
    ...     loss = cross_entropy(logits.flatten(0, 1), here.shard(labels).flatten())

    Layers of `clearhead.nn`, transformers models with ``attn_implementation="clearhead"`` and plain
    calls of `clearhead.attention` then pass shards and get the output of their own queries. Rules
    that a model makes itself, causal or windows, are over the positions of the whole text. Rotary
    and sinusoidal positions of `clearhead.nn` are those of the rank's tokens; a transformers model
    is passed them. What a weight learns on a rank comes from the rank's tokens: add it up over the
    ranks, as data parallel training does. Backward may come after the block.

    Args:
        length: how many tokens the whole text has.
        group, layout: as in `attention`.
        mask: who may look at whom besides what the model says, over all positions, such as
            `documents(ids)` for packed texts; None means no further rule.
        timeout: seconds that a rank waits for another.

    Gives this rank's part as `here`: `here.positions`, `here.shard(x)`, `here.unshard(x)`.

    Raises:
        BadValue, BadType: a layout that does not fit; inside, what `attention` refuses, masks that
            a model pads or that are no rule over positions, `look`, `matrix` and `explain`.
    """
    transport = GroupTransport(group, timeout)
    found = layout_of(layout, length, transport.world)
    rule = everything if mask is None else mask
    here = Shard(found, group, rule, timeout, transport.rank)
    with computed_by(here):
        yield here
