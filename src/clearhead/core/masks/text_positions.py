"""Convert between columns of a call and positions in its texts.

The columns of a call count its queries and keys from 0. The positions of a text count from its
first real token. They differ if texts are padded, and if a cache holds, or has dropped, earlier
tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..torch_state import has_values, loadable

PerText: TypeAlias = int | tuple[int, ...]  # one number for all texts, or one for each


class Padding(NamedTuple):
    """The column of each text's first real token, and the column after its last real token.

    Both are 0 for a text without a real token.
    """

    first: tuple[int, ...]
    after: tuple[int, ...]


def padding_of(real: Tensor) -> Padding | None:
    """Return the padding of a batch, (B, T), with 0 or False on padding; None without padding."""
    if not has_values(real) or not real.numel():
        return None
    tokens = (real.detach() != 0).to("cpu", torch.uint8)
    if tokens.all():
        return None
    first = tokens.argmax(1)
    after = (tokens.shape[1] - tokens.flip(1).argmax(1)) * tokens.any(1)
    return Padding(tuple(first.tolist()), tuple(after.tolist()))


@loadable
class Positions(NamedTuple):
    """The positions of a call's queries and keys in its texts.

    `start` and `first_key` are the positions of query 0 and of key 0, which are negative on padding
    before the text. `start` is None if it is unknown, and `stated` is False if it is a guess.
    `length` is the number of columns from the first to the last real token of each text, None if
    no padding is known. `column` and `dropped` are the columns of query 0 and key 0, counted from
    the first key of the cache, including keys that it has dropped. `keys` is the position after the
    last real key of each text, None if that is the last column.
    """

    start: PerText | None = 0
    first_key: PerText = 0
    length: PerText | None = None
    column: PerText | None = 0
    dropped: int = 0
    stated: bool = True
    keys: PerText | None = None

    @property
    def padded(self) -> bool:
        """Do positions differ from columns because of padding?"""
        return self.length is not None or self.first_key != self.dropped

    def real_queries(self, Tq: int) -> tuple[PerText, PerText]:
        """Return the first query of the call that is a real token, and the one after the last."""
        if self.length is None or self.start is None:
            return 0, Tq
        return (
            per_text(lambda start: min(max(-start, 0), Tq), self.start),
            per_text(lambda start, n: min(max(n - start, 0), Tq), self.start, self.length),
        )

    def real_keys(self, Tk: int) -> tuple[PerText, PerText]:
        """Return the first key of the call that is a real token, and the one after the last."""
        first = per_text(lambda key: min(max(-key, 0), Tk), self.first_key)
        if self.keys is None:
            return first, Tk
        after = per_text(lambda key, n: min(max(n - key, 0), Tk), self.first_key, self.keys)
        return first, after

    def is_real(self, Tq: int) -> Tensor:
        """Return which queries of the call are not padding, (B|1, 1, Tq)."""
        return _between(*self.real_queries(Tq), Tq)

    def is_real_key(self, Tk: int) -> Tensor:
        """Return which keys of the call are not padding, (B|1, 1, Tk)."""
        return _between(*self.real_keys(Tk), Tk)

    def rows(self, named: tuple[int, ...], Tq: int) -> Tensor:
        """Convert rows to queries of the call, (B|1, n), or -1 where a text has no such row.

        Row 0 is the first real token in the call, and row -1 the last.
        """
        first, after = (_column(x) for x in self.real_queries(Tq))
        row = torch.tensor(named, dtype=torch.long).reshape(1, -1)
        query = torch.where(row < 0, after, first) + row
        return torch.where((query >= first) & (query < after), query, -1)

    def numbered(self, named: tuple[int, ...], Tq: int) -> tuple[int, ...]:
        """Count rows from the first one, if all texts of the call have the same length."""
        length = per_text(lambda first, after: after - first, *self.real_queries(Tq))
        if isinstance(length, tuple):
            return named
        return tuple(row % length if length else row for row in named)


BY_COLUMN = Positions()  # positions are columns


class Shift(NamedTuple):
    """The shift from positions of texts to columns of a call.

    A text begins at the columns `queries` and `keys`; `keys` is negative if a cache has dropped
    some. A rule that lists columns shifts by `dropped` alone. `Tk` is the number of keys.
    """

    queries: PerText
    keys: PerText
    dropped: int
    Tk: int


def per_text(compute: Callable[..., int], *numbers: PerText) -> PerText:
    """Apply `compute` to the numbers of each text; return one number if all texts have the same."""
    several = [x for x in numbers if isinstance(x, tuple)]
    if not several:
        return compute(*numbers)
    size = max(map(len, several))
    columns = [x * (size // len(x)) if isinstance(x, tuple) else (x,) * size for x in numbers]
    results = tuple(compute(*row) for row in zip(*columns, strict=True))
    return results[0] if len({*results}) == 1 else results


def _between(first: PerText, after: PerText, size: int) -> Tensor:
    column = torch.arange(size)
    return ((column >= _column(first)) & (column < _column(after))).unsqueeze(1)


def _column(x: PerText) -> Tensor:
    return torch.tensor(x, dtype=torch.long).reshape(-1, 1)


def plus(value: "int | Tensor", by: PerText) -> "int | Tensor":
    """Add two numbers, each of which is one for all texts or one for each text."""
    if isinstance(value, Tensor) or isinstance(by, tuple):
        device = value.device if isinstance(value, Tensor) else torch.device("cpu")
        return value + torch.tensor(by, dtype=torch.long, device=device)
    return value + by
