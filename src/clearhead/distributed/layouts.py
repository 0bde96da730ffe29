"""Which positions of a sequence each rank holds, as ranges. Nothing here needs a process group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from ..errors import BadType, BadValue, as_count, kind_of
from ..masks import Grid, Mask

NAMES = "contiguous", "head-tail"
CHUNKS = 16  # for each rank, which `balanced` deals out


@dataclass(frozen=True)
class Positions:
    """Some positions of a sequence, in rising order, as ranges that do not touch."""

    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    @staticmethod
    def listed(at: Tensor) -> "Positions":
        """From the positions one by one, (n,), in rising order."""
        at = at.cpu()
        gaps = (at.diff() != 1).nonzero().flatten().tolist()
        ends = [0, *(i + 1 for i in gaps), len(at)] if len(at) else []
        return Positions(tuple(range(int(at[i]), int(at[j - 1]) + 1) for i, j in pairwise(ends)))

    @staticmethod
    def of(ranges: Iterable[range]) -> "Positions":
        """Ranges in any order, sorted, and joined where they touch."""
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
        """The positions one by one, (n,)."""
        return _written_out(self.ranges).to(device or "cpu")

    def before(self, x: Tensor) -> Tensor:
        """How many of the positions are smaller than each number in `x`."""
        return torch.searchsorted(self.tensor(x.device), x.contiguous())

    def among(self, outer: "Positions") -> "Positions":
        """Where these positions stand in the list of `outer`, which holds them all."""
        at = torch.tensor([(r.start, r.stop - 1) for r in self.ranges], device="cpu").reshape(-1)
        ends = outer.before(at.long()).tolist()
        return Positions.of(range(a, b + 1) for a, b in zip(ends[::2], ends[1::2], strict=True))

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """`x` at these positions of a dimension; a view where they are one range."""
        if self.contiguous:
            return x.narrow(dim, self.start, len(self))
        return x.index_select(dim, self.tensor(x.device))


@lru_cache(maxsize=64)
def _written_out(ranges: tuple[range, ...]) -> Tensor:
    parts = [torch.arange(r.start, r.stop, device="cpu") for r in ranges]
    return torch.cat(parts) if parts else torch.arange(0, device="cpu")


@dataclass(frozen=True)
class Layout:
    """Which positions each rank holds: for every rank a list of ranges, in rising order.

    Every position from 0 on is held by exactly one rank; a rank may hold none. Made by
    `contiguous`, `head_tail`, `by_document` or `balanced`, or from ranges of one's own. Raises
    `BadValue` for positions that are held twice or by nobody.
    """

    ranges: tuple[tuple[range, ...], ...]

    def __init__(self, ranges: Sequence[Iterable[range]]) -> None:
        held = tuple(Positions.of(of_rank).ranges for of_rank in ranges)
        object.__setattr__(self, "ranges", held)
        end = 0
        for r in sorted(chain.from_iterable(held), key=lambda r: r.start):
            if r.start != end or r.step != 1:
                raise BadValue(
                    f"A layout has {r!r} after position {end}.",
                    "every position from 0 on is held by exactly one rank, in ranges without a "
                    "step.",
                    "name each position once; a rank may hold no ranges.",
                )
            end = r.stop

    def __repr__(self) -> str:
        shown = [", ".join(f"{r.start}:{r.stop}" for r in of_rank) for of_rank in self.ranges]
        text = "; ".join(part or "nothing" for part in shown)
        return f"Layout({text if len(text) <= 80 else text[:77] + '...'})"

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.ranges)

    @cached_property
    def length(self) -> int:
        """How many positions there are in all."""
        return sum(map(len, self.held))

    @cached_property
    def held(self) -> list[Positions]:
        """The positions of each rank."""
        return [Positions(of_rank) for of_rank in self.ranges]

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of every range: its rank, its first position, and the one after its last."""
        found = [(rank, r.start, r.stop) for rank, of in enumerate(self.ranges) for r in of]
        rank, start, stop = torch.tensor(found, device="cpu").long().reshape(-1, 3).T.contiguous()
        return rank, start, stop

    def order(self) -> Tensor:
        """The positions in the order of the shards put one after the other, (T,)."""
        return torch.cat([p.tensor() for p in self.held])

    def inverse(self) -> Tensor:
        """Where each position stands in the shards put one after the other, (T,)."""
        return self.order().argsort()

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """The shard of every rank, from all of it."""
        return [p.cut(x, dim) for p in self.held]

    def join(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """All of it, from the shards of all ranks: the inverse of `split`."""
        joined = torch.cat(list(shards), dim)
        return joined.index_select(dim, self.inverse().to(joined.device))


def contiguous(length: int, world: int) -> Layout:
    """One range after the other, as `torch.chunk` and `Shard` of DTensor cut: the last ones may be
    shorter, or empty.

    >>> contiguous(7, 3)
    Layout(0:3; 3:6; 6:7)
    """
    return Layout([[r] for r in _chunks(length, world)])


def head_tail(length: int, world: int) -> Layout:
    """Of 2 * world chunks, rank r holds chunk r and chunk 2 * world - 1 - r, so that under a causal
    mask all have the same work. Also called zigzag.

    >>> head_tail(12, 3)
    Layout(0:2, 10:12; 2:4, 8:10; 4:8)
    """
    chunks = _chunks(length, 2 * world)
    return Layout([[chunks[r], chunks[2 * world - 1 - r]] for r in range(world)])


def by_document(ids: Tensor | Sequence[int], world: int) -> Layout:
    """Whole documents, so that under a mask of documents no key travels: the longest first, each to
    the rank that holds the fewest tokens. `ids` names the document of each position, (T,).

    >>> by_document([0, 0, 0, 1, 1, 2], 2)
    Layout(0:3; 3:6)
    """
    names = torch.as_tensor(ids, device="cpu")
    if names.dim() != 1:
        raise BadValue(
            f"by_document got ids of shape {tuple(names.shape)}.",
            "a layout cuts one sequence, the same for all of a batch: ids are (T,).",
            "pack every row of the batch alike, or use head_tail or balanced.",
        )
    _, names = names.unique(return_inverse=True)
    texts: dict[int, list[range]] = {}
    ends = (names.diff().nonzero().flatten() + 1).tolist()
    for start, stop in zip([0, *ends], [*ends, len(names)], strict=True):
        if stop > start:
            texts.setdefault(int(names[start]), []).append(range(start, stop))
    sizes = {name: sum(map(len, ranges)) for name, ranges in texts.items()}
    held: list[list[range]] = [[] for _ in range(_world(world))]
    tokens = [0] * world
    for name in sorted(texts, key=lambda name: (-sizes[name], name)):
        rank = min(range(world), key=lambda r: (tokens[r], r))
        held[rank] += texts[name]
        tokens[rank] += sizes[name]
    return Layout(held)


def balanced(mask: Mask, length: int, world: int, *, B: int = 1, H: int = 1) -> Layout:
    """The same number of tokens for each rank, and the work that the mask leaves them as even as
    chunks allow.

    The sequence is cut into 16 chunks for each rank, whose work is counted in pairs that may look.
    The heaviest chunk goes first, to the rank with the least work of those that still want chunks.
    The mask is asked as one of self-attention (Tq = Tk = length).
    """
    grid = Grid(length, length, B, H)
    mask.check(grid)
    mask.must_fit(grid)
    chunks = _chunks(length, CHUNKS * world)
    per_query = mask.key_ranges(grid, torch.device("cpu")).keys_per_query()
    total = per_query.sum((0, 1)).cumsum(0).tolist()
    upto = [0, *total]
    work = [upto[r.stop] - upto[r.start] for r in chunks]
    held: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for chunk in sorted(range(len(chunks)), key=lambda c: (-work[c], c)):
        open_ranks = [r for r in range(world) if len(held[r]) < CHUNKS]
        rank = min(open_ranks, key=lambda r: (load[r], r))
        held[rank].append(chunk)
        load[rank] += work[chunk]
    return Layout([[chunks[c] for c in of_rank] for of_rank in held])


def layout_of(layout: object, length: int, world: int) -> Layout:
    """A layout by name, or one that fits."""
    if layout == "contiguous":
        return contiguous(length, world)
    if layout == "head-tail":
        return head_tail(length, world)
    if not isinstance(layout, Layout):
        raise BadType(
            f"layout is {layout!r}."
            if isinstance(layout, str)
            else f"layout is {kind_of(layout)}.",
            "a layout is 'contiguous', 'head-tail', or one made by by_document(ids, world), "
            "balanced(mask, length, world) or Layout(ranges).",
            "pass one of these.",
        )
    if (layout.world, layout.length) != (world, length):
        raise BadValue(
            f"The layout is of {layout.length} positions on {layout.world} ranks; there are "
            f"{length} positions on {world} ranks.",
            "a layout says for every position which rank of the group holds it.",
            "make it for this length and this many ranks.",
        )
    return layout


def _chunks(length: int, count: int) -> list[range]:
    """`count` ranges of equal length but for the last that is not empty."""
    size = -(-length // _world(count))
    return [range(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]


def _world(count: object) -> int:
    rule = "a sequence is cut for one rank or more."
    hint = "pass the number of ranks, as torch.distributed.get_world_size(group) says it."
    return as_count("A layout was asked with ranks", count, rule, hint, least=1)
