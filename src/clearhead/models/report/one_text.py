"""Take one text of a batch out of an attention call, without the columns of its padding.

Letters: B batch, H query heads, G key/value heads, Tq queries, Tk keys.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...core.masks import Grid, Mask, key_ranges
from ...core.masks.key_ranges import KeyRanges
from ...core.masks.mask import common_align
from ...core.masks.text_positions import PerText, Positions
from ...core.masks.values import Align, offset_of_batch
from ...core.problem.biases import Alibi, Bias, TensorBias
from ...core.problem.problem import Inputs, Problem


@dataclass(frozen=True, eq=False, repr=False)
class TextMask(Mask):
    """The mask `rule` of a batch, for some columns of one of its texts, as ranges.

    `offset` is the position of query 0 among the keys; None if the rule has no alignment.
    """

    rule: Mask
    ranges: KeyRanges
    offset: int | None

    def __repr__(self) -> str:
        return repr(self.rule)

    @property
    def formula(self) -> str:
        return self.rule.formula

    def aligns(self) -> list[Align]:
        return [] if self.offset is None else [self.offset]

    def check(self, grid: Grid) -> None:
        """Accept every grid, because the ranges were checked with the batch."""

    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        return self.ranges

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        cells = self.ranges.to_bool()[0]
        return cells.to(q.device)[h % len(cells), q, k]

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"{self!r}, for one text of a batch"


@dataclass
class TextOfBatch:
    """Takes the text number `text` out of the calls of a batch.

    Layers that share a mask get one mask, so that results that depend on it alone are reused.
    """

    text: int
    _known: list[tuple[Mask, Grid, Positions, slice, Mask]] = field(default_factory=list)

    def call(
        self, problem: Problem, inputs: Inputs, at: Positions
    ) -> tuple[Problem, Inputs, Positions]:
        """Return the call on this text alone; `at` has the positions of the batch."""
        own = self.positions(at)
        first, after = own.real_queries(problem.Tq)
        assert isinstance(first, int) and isinstance(after, int)  # because there is one text
        queries = slice(first, max(first, after))
        keys, mask = self._mask(problem, own, queries)
        q, k, v = (x[self.text : self.text + 1] for x in inputs)
        one = replace(
            problem,
            B=1,
            Tq=queries.stop - queries.start,
            Tk=keys.stop - keys.start,
            mask=mask,
            bias=_bias(problem, self.text, queries, keys),
        )
        start = None if own.start is None else _int(own.start) + queries.start
        own = own._replace(start=start, first_key=_int(own.first_key) + keys.start)
        return one, Inputs(q[:, :, queries], k[:, :, keys], v[:, :, keys]), own

    def positions(self, at: Positions) -> Positions:
        """Return the positions of this text."""
        start, first_key, length, column = (
            x[self.text % len(x)] if isinstance(x, tuple) else x
            for x in (at.start, at.first_key, at.length, at.column)
        )
        return Positions(start, first_key or 0, length, column, at.dropped, at.stated)

    def _mask(self, p: Problem, at: Positions, queries: slice) -> tuple[slice, Mask]:
        """Return the columns of the keys of this text, and its mask for them."""
        for mask, grid, positions, keys, own in self._known:
            if mask is p.mask and (grid, positions) == (p.grid, at):
                return keys, own
        ranges = p.key_ranges
        lo, hi = (_of_text(x, self.text, queries) for x in (ranges.lo, ranges.hi))
        bits = None if ranges.bits is None else _of_text(ranges.bits, self.text, queries)
        of_text = KeyRanges(lo, hi, queries.stop - queries.start, p.Tk, bits)
        first = min(max(0, -_int(at.first_key)), p.Tk)
        seen = of_text.keys_seen().flatten(0, -2).any(0).nonzero()
        # No query of the text may look at its padding.
        keys = slice(first, max(first, int(seen.max()) + 1 if len(seen) else p.Tk))
        Tk = keys.stop - keys.start
        if bits is not None and bits.shape[-1] > 1:
            bits = bits[..., keys]
        lo, hi = ((x - keys.start).clamp(0, Tk) for x in (lo, hi))
        align = common_align(p.mask, p.grid)
        offset = None if align is None else _offset(align, p.grid, self.text, queries, keys)
        own_ranges = KeyRanges(lo, hi, of_text.Tq, Tk, bits)
        own_ranges &= key_ranges.all_keys(of_text.Tq, Tk, lo.device)  # puts empty ranges last
        own = TextMask(p.mask, own_ranges, offset)
        self._known.append((p.mask, p.grid, at, keys, own))
        return keys, own


def _of_text(x: Tensor, text: int, queries: slice) -> Tensor:
    """Select a text and its queries from (B|1, H|1, Tq|1, n)."""
    x = x[text : text + 1] if x.shape[0] > 1 else x
    return x[:, :, queries] if x.shape[2] > 1 else x


def _bias(p: Problem, text: int, queries: slice, keys: slice) -> Bias | None:
    if isinstance(p.bias, TensorBias):
        part = _of_text(p.bias.as_4d(), text, queries)
        return TensorBias(part[..., keys] if part.shape[3] > 1 else part)
    if isinstance(p.bias, Alibi):
        return replace(p.bias, align=_offset(p.bias.align, p.grid, text, queries, keys))
    return p.bias


def _offset(align: object, grid: Grid, text: int, queries: slice, keys: slice) -> int:
    """Return the position of the first of `queries` among `keys`."""
    return int(offset_of_batch(align, grid, torch.tensor(text))) + queries.start - keys.start


def _int(x: PerText) -> int:
    assert isinstance(x, int)
    return x
