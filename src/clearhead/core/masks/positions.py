"""Define masks with one range of keys for each query: causal, window, prefix, lengths."""

import operator
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from . import key_ranges, values
from .grid import Grid
from .key_ranges import UNLIMITED, KeyRanges
from .mask import Bounds, Mask
from .text_positions import PerText, Shift, per_text, plus

# The hint for a tokenizer's attention_mask, which marks positions instead of counting them.
PADDED = (
    "pass attention_mask.sum(-1) for padding on the right, or use "
    "mask=dense(keep=attention_mask.bool()[:, None, None, :]) for any padding."
)


class OneRange(Mask):
    """A mask in which each query may look at one range of keys."""

    @abstractmethod
    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds: ...

    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        return key_ranges.from_bounds(*self.bounds(grid, device), grid.Tq, grid.Tk, device)


@dataclass(frozen=True, eq=False, repr=False)
class Aligned(OneRange):
    """A rule about distances. `align` is the position of query 0 among the keys, as in `Causal`."""

    align: values.Align

    def sizes(self) -> dict[str, int]:
        return values.fixed_batch(self.align)

    def aligns(self) -> list[values.Align]:
        return [] if self.align is None else [self.align]

    def with_align(self, align: values.Align) -> Mask:
        return replace(self, align=align) if self.align is None else self

    def shifted(self, shift: Shift) -> Mask:
        return replace(self, align=_shifted_align(self.align, shift))


@dataclass(frozen=True, eq=False, repr=False)
class Everything(OneRange):
    """Let every query look at every key."""

    formula = "every query may look at every key"

    def __repr__(self) -> str:
        return "everything"

    def check(self, grid: Grid) -> None:
        pass

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= 0) & (k >= 0)

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds:
        return None, None

    def band(self, grid: Grid) -> tuple[int, int] | None:
        return UNLIMITED, UNLIMITED

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return "everything: nothing is masked"


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Aligned):
    """Let a query look at its own position and all positions before it: k <= q + offset.

    `align` is the position of query 0 among the keys: a number, or one per batch (B,). ``"start"``
    means key 0 (torch's `is_causal`), and ``"end"`` that the last query is at the last key (a
    cache). None is allowed only if Tq = Tk: otherwise the call raises `BadValue`, and so does any
    other text. Raises `BadType` if `align` is not a whole number.
    """

    align: values.Align = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "align", values.as_align(self.align))

    def __call__(self, *args: object, **keywords: object) -> None:
        rule = "causal is already a mask, for Tq = Tk; Causal(align=...) is for other sizes."
        hint = "pass mask=clearhead.causal, or mask=clearhead.Causal(align='end')."
        raise BadType("causal was called.", rule, hint)

    def __repr__(self) -> str:
        return (
            "causal" if self.align is None else f"Causal(align={values.format_numbers(self.align)})"
        )

    @property
    def formula(self) -> str:
        return f"k <= q{values.format_offset(self.align)}"

    def check(self, grid: Grid) -> None:
        values.check_batch(self, self.align, grid)
        values.check_align(self, self.align, grid, "Causal")

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q + values.offset_of_batch(self.align, grid, b)

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds:
        return None, values.query_positions(self.align, grid, device) + 1

    def band(self, grid: Grid) -> tuple[int, int] | None:
        offset = values.shared_offset(self.align, grid)
        return None if offset is None else (UNLIMITED, offset)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        position = q + int(values.offset_of_batch(self.align, grid, torch.tensor(b, device="cpu")))
        side = "after" if k > position else "at or before"
        return f"{self!r}: key position {k} is {side} query position {position}"


@dataclass(frozen=True, eq=False, repr=False, init=False)
class window(Aligned):
    """Let a query look `before` positions back and `after` positions ahead, both inclusive.

    ``window(before=0, after=0)`` sees only itself; None means no limit on that side. `align` is as
    in `Causal`. Without keywords both sides are required, ``window(3, 0)``; a single number raises
    `BadType`, because it would leave the other side without a limit.
    """

    before: int | None
    after: int | None

    def __init__(
        self, *sides: int | None, before: int | None = None, after: int | None = None,
        align: values.Align = None,
    ) -> None:  # fmt: skip
        if sides:
            before, after = _both_sides(sides, before, after)
        object.__setattr__(self, "align", values.as_align(align))
        for name, side in (("before", before), ("after", after)):
            value = None if side is None else whole_number(side)
            object.__setattr__(self, name, value)
            if value is None and side is not None:
                rule = "a window is a whole number of positions, or None for no limit."
                hint = f"pass a whole number, for example {name}=127."
                raise BadType(f"window got {name}={side!r}.", rule, hint)
            if value is not None and value < 0:
                rule = "a window is a distance, 0 or more; 0 means the position itself."
                hint = "shift the window with align=, or compose two windows with & and ~."
                raise BadValue(f"window got {name}={value}.", rule, hint)
            if value is not None:
                values.must_be_near(f"window got {name}", value)

    def __repr__(self) -> str:
        align = "" if self.align is None else f", align={values.format_numbers(self.align)}"
        return f"window(before={self.before}, after={self.after}{align})"

    @property
    def formula(self) -> str:
        q = f"q{values.format_offset(self.align)}"
        low = "" if self.before is None else f"{q} - {self.before} <= ".replace(" - 0", "")
        high = "" if self.after is None else f" <= {q} + {self.after}".removesuffix(" + 0")
        return f"{low}k{high}" if low or high else Everything.formula

    def check(self, grid: Grid) -> None:
        values.check_batch(self, self.align, grid)
        if self.before is not None or self.after is not None:
            values.check_align(self, self.align, grid, "window")

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        position = q + values.offset_of_batch(self.align, grid, b)
        allowed = (q >= 0) & (k >= 0)
        if self.before is not None:
            allowed = allowed & (k >= position - self.before)
        if self.after is not None:
            allowed = allowed & (k <= position + self.after)
        return allowed

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds:
        q = values.query_positions(self.align, grid, device)
        lo = None if self.before is None else q - self.before
        return lo, None if self.after is None else q + (self.after + 1)

    def band(self, grid: Grid) -> tuple[int, int] | None:
        offset = values.shared_offset(self.align, grid)
        if offset is None:
            return None
        before = UNLIMITED if self.before is None else self.before - offset
        return before, UNLIMITED if self.after is None else self.after + offset

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        distance = (
            k - q - int(values.offset_of_batch(self.align, grid, torch.tensor(b, device="cpu")))
        )
        where = "at the query itself"
        if distance:
            where = f"{abs(distance)} {'ahead of' if distance > 0 else 'behind'} the query"
        return f"{self!r}: key {k} is {where}"


def _both_sides(
    sides: tuple[int | None, ...], before: int | None, after: int | None
) -> tuple[int | None, int | None]:
    """Return the two sides of a window that were passed without keywords."""
    if len(sides) == 2 and before is after is None:
        return sides
    gave = f"window got {', '.join(map(repr, sides))} without a keyword."
    rule = "a window takes both sides, or keywords; a side without a keyword has no limit."
    hint = f"pass before={sides[0]!r}, after=0 to look only back, or before= alone to look ahead."
    raise BadType(gave, rule, hint)


@dataclass(frozen=True, eq=False, repr=False)
class prefix(OneRange):
    """Let every query look at the first `n` keys: k < n.

    `n` is one number, or one per batch (B,). ``causal | prefix(n)`` is the mask of a prefix
    language model.

    Raises `BadValue` if n is negative or has more than one dimension, and in a call of another
    batch size; `BadType` if it is not a whole number.
    """

    n: values.Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", values.as_counts(self.n, "prefix", "n"))

    def __repr__(self) -> str:
        return f"prefix({values.format_numbers(self.n)})"

    @property
    def formula(self) -> str:
        return f"k < {values.symbol(self.n, 'n')}"

    def sizes(self) -> dict[str, int]:
        return values.fixed_batch(self.n)

    def shifted(self, shift: Shift) -> Mask:
        return prefix(_moved(self.n, shift.keys))

    def check(self, grid: Grid) -> None:
        values.check_batch(self, self.n, grid)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < values.batch_value(self.n, b)) & (q >= 0)

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds:
        return None, values.batch_column(self.n, device)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        n = int(values.batch_value(self.n, torch.tensor(b, device="cpu")))
        return f"{self!r}: key {k} is {'within' if k < n else 'beyond'} the first {n}"


@dataclass(frozen=True, eq=False, repr=False)
class lengths(OneRange):
    """Mask padding at the end: only the first `keys` keys and `queries` queries take part.

    Both are one number, or one per batch (B,), and not larger than the size of the call; None means
    all. A query beyond its length is fully masked, and its output is 0.

    Raises `BadValue` if both are None, if a length is negative, and in a call of another batch size
    or with fewer keys or queries; `BadType` if a length is not a whole number.
    """

    keys: "values.Ints | None" = None
    queries: "values.Ints | None" = None

    _largest: ClassVar[tuple[int | None, int | None]] = None, None  # queries and keys, if known
    _largest_version: ClassVar[object] = None  # the version of the mask when they were computed

    def __post_init__(self) -> None:
        for name in ("keys", "queries"):
            if getattr(self, name) is not None:
                counts = values.as_counts(getattr(self, name), "lengths", name, PADDED)
                object.__setattr__(self, name, counts)
        if self.keys is None and self.queries is None:
            rule = "lengths needs the number of real keys, queries or both; the others are padding."
            hint = "pass keys=, queries= or both; use `everything` for no mask."
            raise BadValue("lengths got neither keys= nor queries=.", rule, hint)
        self._find_largest()

    def _find_largest(self) -> None:
        version = None if torch.compiler.is_compiling() else self.version()
        object.__setattr__(
            self, "_largest", (values.largest(self.queries), values.largest(self.keys))
        )
        object.__setattr__(self, "_largest_version", version)

    def __repr__(self) -> str:
        arguments = [
            f"{name}={values.format_numbers(getattr(self, name))}"
            for name in ("keys", "queries")
            if getattr(self, name) is not None
        ]
        return f"lengths({', '.join(arguments)})"

    @property
    def formula(self) -> str:
        parts = []
        if self.keys is not None:
            parts.append(f"k < {values.symbol(self.keys, 'keys')}")
        if self.queries is not None:
            parts.append(f"q < {values.symbol(self.queries, 'queries')}")
        return " and ".join(parts)

    def sizes(self) -> dict[str, int]:
        return {**values.fixed_batch(self.keys), **values.fixed_batch(self.queries)}

    def shifted(self, shift: Shift) -> Mask:
        keys, queries = (
            None if n is None else _moved(n, by)
            for n, by in ((self.keys, shift.keys), (self.queries, shift.queries))
        )
        return lengths(keys=keys, queries=queries)

    def check(self, grid: Grid) -> None:
        for value in (self.keys, self.queries):
            values.check_batch(self, value, grid)

    def must_fit(self, grid: Grid) -> None:
        if not torch.compiler.is_compiling() and self._largest_version != self.version():
            self._find_largest()
        for name, most, size in zip(("queries", "keys"), self._largest, grid[:2], strict=True):
            if most is not None and most > size:
                gave = f"{self!r} counts {most} {name}, and there are {size}."
                rule = "a length counts real keys or queries, at most those of the call."
                hint = f"cut the lengths as the texts are, or allow more keys by prefix({most})."
                raise BadValue(gave, rule, hint)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (q >= 0) & (k >= 0)
        if self.keys is not None:
            allowed = allowed & (k < values.batch_value(self.keys, b))
        if self.queries is not None:
            allowed = allowed & (q < values.batch_value(self.queries, b))
        return allowed

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds:
        hi = None if self.keys is None else values.batch_column(self.keys, device)
        if self.queries is not None:
            q = torch.arange(grid.Tq, device=device).reshape(1, 1, -1)
            real = q < values.batch_column(self.queries, device)
            hi = torch.where(real, grid.Tk if hi is None else hi, 0)
        return None, hi

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        clauses = []
        for name, value, index in (("key", self.keys, k), ("query", self.queries, q)):
            if value is not None:
                n = int(values.batch_value(value, torch.tensor(b, device="cpu")))
                clauses.append(
                    f"{name} {index} is {'one of' if index < n else 'beyond'} the {n} real"
                )
        return f"{self!r}: {', '.join(clauses)}"


def _moved(count: values.Ints, by: PerText) -> values.Ints:
    """Convert a count of positions to a count of columns, 0 or more."""
    n = plus(cast("int | Tensor", count), by)
    return n.clamp(min=0) if isinstance(n, Tensor) else max(n, 0)


def _shifted_align(align: values.Align, shift: Shift) -> values.Align:
    """Convert the position of query 0 in its text to its position among the keys of the call."""
    if align is None or align == "end":
        return align
    by = per_text(operator.sub, shift.keys, shift.queries)
    return plus(0 if align == "start" else cast("int | Tensor", align), by)


everything = Everything()
causal = Causal()


def intersect(a: Mask, b: Mask) -> Mask:
    """Return ``a & b``, or only one of them if the other is `everything`."""
    if isinstance(a, Everything):
        return b
    return a if isinstance(b, Everything) else a & b
