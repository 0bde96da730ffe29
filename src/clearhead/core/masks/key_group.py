"""Read a mask as a group of keys: key ranges, and ids that a query and a key must share.

A text repeats its tokens so often that the keys with a query's id are many ranges, which take
O(Tq x Tk) memory. Ids take O(Tq + Tk), and two of them are compared for each cell.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadValue
from ..torch_state import is_plain
from .data import documents
from .grid import Grid
from .key_ranges import KeyRanges
from .mask import And, Mask
from .positions import everything, intersect, prefix, window
from .values import stream_of, to_device

MOST_IDS = 2**24  # float32 holds smaller whole numbers exactly


class GroupMask(NamedTuple):
    """A group of keys as kernels read it: a band or ranges, and numbered ids of queries and keys,
    which must be equal."""

    before: int
    after: int
    lo: Tensor | None
    hi: Tensor | None
    bits: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None


@dataclass(frozen=True, eq=False)
class KeyGroup:
    """The keys that `rule` allows, with the id of the query in every one of `documents`."""

    rule: Mask
    documents: tuple[documents, ...]
    grid: Grid
    device: torch.device | None

    @cached_property
    def band(self) -> tuple[int, int] | None:
        """The `Mask.band` of the rule."""
        return self.rule.band(self.grid)

    @cached_property
    def ranges(self) -> KeyRanges:
        """The key ranges of the rule."""
        return self.rule.key_ranges(self.grid, self.device)

    @cached_property
    def ids(self) -> list[tuple[Tensor, Tensor]]:
        """The ids of queries, (B|1, Tq), and of keys, (B|1, Tk)."""
        pairs = (x.ids_of_both() for x in self.documents)
        return [(to_device(q, self.device), to_device(k, self.device)) for q, k in pairs]

    def to_bool(self, queries: slice, keys: slice) -> Tensor:
        """Return which keys are in the group, (B|1, H|1, q, k), for a block."""
        cells = self.ranges.to_bool(queries, keys)
        for of_query, of_key in self.ids:
            equal = of_query[:, queries].unsqueeze(-1) == of_key[:, keys].unsqueeze(-2)
            cells = cells & equal.unsqueeze(1)
        return cells

    def tile_lists(self, queries: slice, width: int) -> tuple[list[bool], list[bool]]:
        """Return `KeyRanges.tile_lists`; no tile is known to be full if there are ids."""
        some, full = self.ranges.tile_lists(queries, width)
        return some, [False] * len(full) if self.documents else full

    @cached_property
    def numbered_ids(self) -> tuple[Tensor | None, Tensor | None]:
        """Whole numbers in float32 that are equal where all ids are equal.

        They are of the queries, (B|1, 1, Tq), and of the keys, (B|1, 1, Tk); None without ids.
        Nothing waits for a GPU.
        """
        if not self.ids:
            return None, None
        count = self.grid.Tq + self.grid.Tk
        if count > MOST_IDS:
            rule = f"the kernels distinguish {MOST_IDS}."
            hint = "pass fewer queries at once, or engine='tiled'."
            raise BadValue(f"A group compares the ids of {count} queries and keys.", rule, hint)
        B = max(x.shape[0] for pair in self.ids for x in pair)
        pairs = (torch.cat([x.expand(B, -1) for x in pair], 1) for pair in self.ids)
        numbers = reduce(lambda a, b: _numbered(a * count + b), map(_numbered, pairs))
        of_query, of_key = numbers.float().unsqueeze(1).split([self.grid.Tq, self.grid.Tk], 2)
        return of_query, of_key

    @cached_property
    def mask(self) -> GroupMask:
        """The group as kernels read it."""
        if self.band is not None:
            return GroupMask(*self.band, None, None, None, *self.numbered_ids)
        ranges = self.ranges
        return GroupMask(0, 0, ranges.lo, ranges.hi, ranges.bits, *self.numbered_ids)

    @property
    def can_be_stored(self) -> bool:
        """Whether the group takes O(Tq + Tk) memory, and kernels can read it."""
        if self.documents and self.grid.Tq + self.grid.Tk > MOST_IDS:
            return False
        if self.device is not None and self.device.type == "cuda":
            _ = self.mask  # computed now, since tensors that a CUDA graph captures have no values
        if self.band is not None:
            return True
        return type(self.ranges.lo) is Tensor and self.ranges.bits is None


def _numbered(ids: Tensor) -> Tensor:
    """Replace ids, (B, n), by numbers below n that are equal where the ids of a text are equal."""
    return torch.searchsorted(ids.sort(-1).values, ids)


def key_groups(masks: Iterable[Mask], grid: Grid, device: torch.device | None) -> list[KeyGroup]:
    """Return the keys that each mask allows as a group, whose ids are not turned into ranges.

    A mask stores its last group, which is the same in every layer, as `CachedRanges` stores ranges.
    Ranges with bits, which take O(Tq x Tk) memory, are not stored.
    """
    if not is_plain():
        return [_key_group(mask, grid, device) for mask in masks]
    of_call, stream = (grid, device, torch.is_inference_mode_enabled()), stream_of(device)
    captures = stream is None and device is not None and device.type == "cuda"
    groups = []
    for mask in masks:
        key = of_call, mask.version()
        key_of_stored, of_stored, group = mask.__dict__.get("_group", (None, None, None))
        if key != key_of_stored or stream not in (of_stored, None):
            group = _key_group(mask, grid, device)
            if not captures and group.can_be_stored:
                mask.__dict__["_group"] = key, stream, group
        elif captures:
            mask.__dict__.setdefault("_captured", set()).add(group)
        groups.append(group)
    return groups


def _key_group(mask: Mask, grid: Grid, device: torch.device | None) -> KeyGroup:
    parts = mask.parts if isinstance(mask, And) else (mask,)
    by_id = tuple(x for x in parts if isinstance(x, documents))
    rules = (x for x in parts if not isinstance(x, documents))
    return KeyGroup(reduce(intersect, (everything, *rules)), by_id, grid, device)


_EARLIER = ~window(before=1, after=None) & ~prefix(1)


def duplicate_keys(ids: "Tensor | Iterable[int]") -> Mask:
    """Let a query look at earlier copies of its own token, to sum their weights by `mass`.

    ``ids[k] == ids[q] and 1 <= k <= q - 2``. The previous token and the first one do not count,
    because a head may look at them wherever they are copies or not. `ids` are (T,) or (B, T),
    with those of padding.
    """
    return documents(ids) & _EARLIER


def induction_keys(ids: "Tensor | Iterable[int]") -> Mask:
    """Let a query look at the keys after earlier copies of its token, to sum weights by `mass`.

    ``ids[k - 1] == ids[q] and 1 <= k <= q - 2``. So a token repeated at once is not its own
    induction key. `ids` are (T,) or (B, T), with those of padding.
    """
    copies = documents(ids).ids
    assert isinstance(copies, Tensor)
    return documents(copies.roll(1, -1), queries=copies) & _EARLIER
