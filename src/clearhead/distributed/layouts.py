"""Layouts: which positions of a sequence each rank holds. No process group is needed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from ..core.errors import BadType, BadValue, as_count, kind_of, must_be_of
from ..core.masks import Grid, Mask

CHUNKS = 16  # of each rank, in `balanced`


@dataclass(frozen=True)
class Positions:
    """Positions of a sequence in increasing order, as ranges with gaps between them."""

    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    @staticmethod
    def listed(at: Tensor) -> "Positions":
        """Create it from single positions, (n,), in increasing order."""
        at = at.cpu()
        gaps = (at.diff() != 1).nonzero().flatten().tolist()
        ends = [0, *(i + 1 for i in gaps), len(at)] if len(at) else []
        return Positions(tuple(range(int(at[i]), int(at[j - 1]) + 1) for i, j in pairwise(ends)))

    @staticmethod
    def of(ranges: Iterable[range]) -> "Positions":
        """Create it from ranges in any order; adjacent ranges are joined."""
        joined: list[range] = []
        for r in sorted((r for r in ranges if len(r)), key=lambda r: r.start):
            if joined and joined[-1].stop == r.start:
                r = range(joined.pop().start, r.stop)
            joined.append(r)
        return Positions(tuple(joined))

    @property
    def contiguous(self) -> bool:
        return len(self.ranges) <= 1

    @property
    def start(self) -> int:
        return self.ranges[0].start if self.ranges else 0

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """Return the single positions, (n,)."""
        return _written_out(self.ranges).to(device or "cpu")

    def before(self, x: Tensor) -> Tensor:
        """Count the positions that are smaller than each number in `x`."""
        return torch.searchsorted(self.tensor(x.device), x.contiguous())

    @lru_cache(maxsize=256)  # noqa: B019  # positions are small
    def among(self, outer: "Positions") -> "Positions":
        """Return the indices of these positions in the list of `outer`, which contains them all."""
        at = torch.tensor([(r.start, r.stop - 1) for r in self.ranges], device="cpu").reshape(-1)
        ends = outer.before(at.long()).tolist()
        return Positions.of(range(a, b + 1) for a, b in zip(ends[::2], ends[1::2], strict=True))

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return `x` at these positions of a dimension; a view if they are one range."""
        if self.contiguous:
            return x.narrow(dim, self.start, len(self))
        return x.index_select(dim, self.tensor(x.device))


@lru_cache(maxsize=64)
def _written_out(ranges: tuple[range, ...]) -> Tensor:
    parts = [torch.arange(r.start, r.stop, device="cpu") for r in ranges]
    return torch.cat(parts) if parts else torch.arange(0, device="cpu")


@dataclass(frozen=True)
class Layout:
    """The positions of each rank: for every rank a list of ranges, in increasing order.

    Exactly one rank holds each position from 0 on; a rank may hold none. Create a layout by
    `contiguous`, `head_tail`, `by_document` or `balanced`, or from your own ranges. Raises
    `BadValue` if a position is on two ranks or on none.
    """

    ranges: tuple[tuple[range, ...], ...]

    def __init__(self, ranges: Sequence[Iterable[range]]) -> None:
        joined = tuple(Positions.of(of_rank).ranges for of_rank in ranges)
        object.__setattr__(self, "ranges", joined)
        end = 0
        for r in sorted(chain.from_iterable(joined), key=lambda r: r.start):
            if r.start != end or r.step != 1:
                rule = "exactly one rank holds each position from 0 on, in ranges without a step."
                hint = "list each position once; a rank may hold no ranges."
                raise BadValue(f"A layout has {r!r} after position {end}.", rule, hint)
            end = r.stop

    def __repr__(self) -> str:
        texts = [", ".join(f"{r.start}:{r.stop}" for r in of_rank) for of_rank in self.ranges]
        text = "; ".join(part or "nothing" for part in texts)
        return f"Layout({text if len(text) <= 80 else text[:77] + '...'})"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    @cached_property
    def length(self) -> int:
        """The number of positions of all ranks."""
        return sum(map(len, self.positions))

    @cached_property
    def positions(self) -> list[Positions]:
        """The positions of each rank."""
        return [Positions(of_rank) for of_rank in self.ranges]

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rank of every range, its first position, and the position after its last."""
        ends = [(rank, r.start, r.stop) for rank, of in enumerate(self.ranges) for r in of]
        rank, start, stop = torch.tensor(ends, device="cpu").long().reshape(-1, 3).T.contiguous()
        return rank, start, stop

    def order(self) -> Tensor:
        """Return the positions in the order of the concatenated shards, (T,)."""
        return torch.cat([p.tensor() for p in self.positions])

    def inverse(self) -> Tensor:
        """Return the index of each position in the concatenated shards, (T,)."""
        return self.order().argsort()

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """Split a tensor of the whole sequence into the shards of all ranks."""
        return [self.part(x, rank, dim) for rank in range(self.world)]

    def part(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return the shard of one rank, contiguous in memory, so that it can be reshaped."""
        return self.positions[rank].cut(x, dim).contiguous()

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Join the shards of all ranks: the inverse of `split`."""
        joined = torch.cat(list(shards), dim)
        return joined.index_select(dim, self.inverse().to(joined.device))


def contiguous(length: int, world: int) -> Layout:
    """Give each rank one range, as `torch.chunk` and `Shard` of DTensor do. The last ranges may be
    shorter, or empty. Raises `BadValue` if `length` is negative or `world` below 1.

    >>> contiguous(7, 3)
    Layout(0:3; 3:6; 6:7)
    """
    return Layout([[r] for r in _chunks(length, world)])


def head_tail(length: int, world: int) -> Layout:
    """Give rank r the chunks r and 2 * world - 1 - r of 2 * world chunks, so that all ranks have
    the same work under a causal mask. This layout is also called zigzag. Raises `BadValue` if
    `length` is negative or `world` below 1.

    >>> head_tail(12, 3)
    Layout(0:2, 10:12; 2:4, 8:10; 4:8)
    """
    chunks = _chunks(length, 2 * _world(world))
    return Layout([[chunks[r], chunks[2 * world - 1 - r]] for r in range(world)])


def by_document(ids: Tensor | Sequence[int], world: int) -> Layout:
    """Give each rank whole documents, so that under a mask of documents no key is sent.

    The longest document comes first, and each goes to the rank with the fewest tokens. `ids` names
    the document of each position, (T,). Raises `BadType` unless they are numbers, and `BadValue`
    for other dimensions, or `world` below 1.

    >>> by_document([0, 0, 0, 1, 1, 2], 2)
    Layout(0:3; 3:6)
    """
    try:
        names = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        rule = "ids are a tensor or a list of numbers, one for each position."
        hint = "pass for example [0, 0, 1, 1]."
        raise BadType(f"by_document got {kind_of(ids)} for ids.", rule, hint) from error
    if names.dim() != 1:
        rule = "a layout cuts all sequences of a batch alike, so ids are (T,)."
        hint = "pack every row of the batch alike, or use head_tail or balanced."
        raise BadValue(f"by_document got ids of shape {tuple(names.shape)}.", rule, hint)
    _, names = names.unique(return_inverse=True)
    texts: dict[int, list[range]] = {}
    ends = (names.diff().nonzero().flatten() + 1).tolist()
    for start, stop in zip([0, *ends], [*ends, len(names)], strict=True):
        if stop > start:
            texts.setdefault(int(names[start]), []).append(range(start, stop))
    sizes = [sum(map(len, texts[name])) for name in range(len(texts))]
    shares = _spread(sizes, _world(world), len(texts))
    return Layout([[part for name in share for part in texts[name]] for share in shares])


def balanced(mask: Mask, length: int, world: int, *, B: int = 1, H: int = 1) -> Layout:
    """Give each rank the same number of tokens, and about the same work under the mask.

    The sequence is cut into 16 chunks for each rank. The work of a chunk is the number of its
    (query, key) pairs that the mask allows, for self-attention (Tq = Tk = length). The chunk with
    the most work comes first, and each goes to the rank with the least work that has fewer than 16
    chunks.

    Raises `BadType` unless `mask` is a mask, and `BadValue` if it does not fit `length`, or if a
    number is out of range.
    """
    rule = "the work of a rank is the number of pairs that a mask of clearhead allows."
    must_be_of(Mask, "balanced with mask=", mask, rule, "pass for example clearhead.causal.")
    grid = Grid(length, length, B, H)
    mask.check(grid)
    mask.must_fit(grid)
    chunks = _chunks(length, CHUNKS * world)
    per_query = mask.key_ranges(grid, torch.device("cpu")).keys_per_query()
    total = per_query.sum((0, 1)).cumsum(0).tolist()
    upto = [0, *total]
    work = [upto[r.stop] - upto[r.start] for r in chunks]
    return Layout([[chunks[c] for c in share] for share in _spread(work, world, CHUNKS)])


def _spread(work: Sequence[int], world: int, most: int) -> list[list[int]]:
    """Give each rank at most `most` items: those with the most work first, each to the rank with
    the least work."""
    shares: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for item in sorted(range(len(work)), key=lambda i: -work[i]):
        rank = min((r for r in range(world) if len(shares[r]) < most), key=load.__getitem__)
        shares[rank].append(item)
        load[rank] += work[item]
    return shares


def layout_of(layout: object, length: int, world: int) -> Layout:
    """Return a layout by name, or check that a `Layout` fits."""
    if layout == "contiguous":
        return contiguous(length, world)
    if layout == "head-tail":
        return head_tail(length, world)
    if not isinstance(layout, Layout):
        gave = f"layout is {repr(layout) if isinstance(layout, str) else kind_of(layout)}."
        rule = "a layout is 'contiguous', 'head-tail' or a Layout, such as by_document returns."
        raise BadType(gave, rule, "pass one of these.")
    if (layout.world, layout.length) != (world, length):
        own = f"{layout.length} positions on {layout.world} ranks"
        gave = f"The layout has {own}; there are {length} positions on {world} ranks."
        rule = "a layout assigns every position to a rank of the group."
        raise BadValue(gave, rule, "create it for this length and this number of ranks.")
    return layout


def _chunks(length: int, count: int) -> list[range]:
    """Cut into `count` ranges of equal length; the last that is not empty may be shorter."""
    rule = "a layout is of a sequence of 0 or more positions."
    hint = "pass the number of its tokens."
    length = as_count("A layout was requested with length", length, rule, hint)
    size = -(-length // _world(count))
    return [range(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]


def _world(count: object) -> int:
    rule = "a sequence is cut for one rank or more."
    hint = "pass the number of ranks, torch.distributed.get_world_size(group)."
    return as_count("A layout was requested with ranks", count, rule, hint, least=1)
