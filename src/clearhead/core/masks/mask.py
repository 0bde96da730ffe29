"""Define the base class of masks, and the masks that combine others: And, Or, Not.

Letters: B batch, H query heads, Tq queries, Tk keys; lower case for one index.
"""

import operator
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import ClassVar, NoReturn, TypeAlias

import torch
from torch import Tensor

from ..errors import BadType, BadValue
from ..formatting import ShownInNotebook
from ..torch_state import has_values, is_plain
from . import key_ranges
from .export import Exports
from .grid import Grid, check_int, make_grid
from .key_ranges import UNLIMITED, KeyRanges
from .text_positions import Shift
from .values import Align, shared_offset, stream_of

Bounds: TypeAlias = tuple[Tensor | None, Tensor | None]


class Mask(ShownInNotebook, Exports):
    """A rule for which query may look at which key.

    A mask copies its arguments. Its own tensors may be changed in place by operations of torch, and
    every engine then uses the new values. Writes through `.data` or a NumPy array may be missed,
    because torch does not count them.
    """

    _tensors: tuple[Tensor, ...]  # of the rule and its parts, after the first call of `version`

    @property
    @abstractmethod
    def formula(self) -> str:
        """The rule as a formula in q (query position) and k (key position)."""

    @abstractmethod
    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        """Write why this cell is allowed or not, for a reader."""

    def band(self, grid: Grid) -> tuple[int, int] | None:
        """Return (before, after) if query q may look at exactly keys q - before to q + after.

        This must hold in every batch and head; else returns None. Engines need no tensors for it.
        """
        return None

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds | None:
        """Return (lo, hi) if the rule is lo <= k < hi, else None.

        Both are integers that broadcast to (B, H, Tq), or None for no limit. They may be outside
        the range of the keys.
        """
        return None

    def aligns(self) -> list[Align]:
        """Return the `align=` of all parts that have one."""
        return []

    def with_align(self, align: Align) -> "Mask":
        """Return this rule with `align` in all parts that have ``align=None``."""
        return self

    def shifted(self, shift: Shift) -> "Mask":
        """Convert a rule about positions of texts to a rule about the columns of a call."""
        return self

    def version(self) -> Hashable:
        """Return how often each tensor of the mask was changed in place.

        Results computed from the mask are valid while the version stays equal. For inference
        tensors, whose changes torch does not count, the version equals no other.
        """
        try:
            tensors = self._tensors
            if len(tensors) == 1:  # 0.2 us less than a tuple of one
                return tensors[0]._version
            return tuple([x._version for x in tensors])
        except AttributeError:  # the first call
            object.__setattr__(self, "_tensors", tuple(tensors_of(self)))
            return self.version()
        except RuntimeError:  # an inference tensor
            return object()

    def __getstate__(self) -> dict[str, object]:
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]  # every mask is a dataclass
        return {name: getattr(self, name) for name in names}  # other attributes follow from these

    def __and__(self, other: "Mask") -> "Mask":
        return _composed(And, self, _check_mask(other, "&"))

    def __or__(self, other: "Mask") -> "Mask":
        return _composed(Or, self, _check_mask(other, "|"))

    def __rand__(self, other: object) -> "Mask":
        return _check_mask(other, "&") & self

    def __ror__(self, other: object) -> "Mask":
        return _check_mask(other, "|") | self

    def __invert__(self) -> "Mask":
        return self.mask if isinstance(self, Not) else Not((self,))

    def __bool__(self) -> bool:
        gave = f"{self!r} was used as a truth value, for example with `and`, `or` or `not`."
        raise BadType(gave, "masks compose cell by cell.", "write `a & b`, `a | b` or `~a`.")

    __array_ufunc__ = None  # so that NumPy leaves `array & mask` to `__rand__`, which refuses it

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NoReturn:
        rule = "a mask is a rule; an array needs the numbers of queries and keys."
        raise BadType(f"{self!r} was converted to an array.", rule, "call to_bool(Tq, Tk).")

    def __eq__(self, other: object) -> bool:
        return self.equals(other) if isinstance(other, Mask) else NotImplemented

    def equals(self, other: "Mask", read: bool = True) -> bool:
        """Are the two masks equal? With ``read=False``, tensors are compared by identity."""
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]  # every mask is a dataclass
        return type(self) is type(other) and all(
            _equal(getattr(self, name), getattr(other, name), read) for name in names
        )

    def __hash__(self) -> int:
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]  # as above
        return hash((type(self), *(x.shape if isinstance(x, Tensor) else x for x in values)))

    def __str__(self) -> str:
        line = f"{self!r}: {self.formula}"
        try:
            picture = self.picture()
        except BadValue:  # no sizes fit all parts, or meta tensors hold no numbers
            return line
        legend = "\n▒ some may: of the batch, the heads or that block" if "▒" in picture else ""
        return f"{line}\n{picture}{legend}"

    def why(
        self,
        q: int,
        k: int,
        *,
        Tq: int | None = None,
        Tk: int | None = None,
        b: int = 0,
        h: int = 0,
    ) -> str:
        """Explain whether query `q` may look at key `k`, and by which rule.

        Only rules that count from the end need `Tq` and `Tk`. None means the size that the rule
        fixes, or else the smallest that has this pair. Raises `BadValue` for a pair outside the
        sizes, and `BadType` for a value that is not a whole number.
        """
        q, k, b, h = (check_int(n, x) for n, x in (("q", q), ("k", k), ("b", b), ("h", h)))
        if min(q, k, b, h) < 0:
            gave = f"why got query {q}, key {k}, batch {b}, head {h}."
            raise BadValue(gave, "positions count from 0.", "pass numbers that are not negative.")
        grid = make_grid(self, Tq, Tk, default=max(q, k) + 1, at_least=(q + 1, b + 1, h + 1))
        for name, index, size in (
            ("query", q, grid.Tq),
            ("key", k, grid.Tk),
            ("batch", b, grid.B),
            ("head", h, grid.H),
        ):
            if index >= size:
                rule = "positions count from 0 and stay below the size."
                hint = f"pass a {name} from 0 to {size - 1}, or larger sizes Tq= and Tk=."
                raise BadValue(f"why got {name} {index}, and there are {size}.", rule, hint)
        verb = "may look" if self.allows(grid, b, h, q, k) else "may not look"
        return f"query {q} {verb} at key {k}: {self.reason(grid, b, h, q, k)}"

    def allows(self, grid: Grid, b: int, h: int, q: int, k: int) -> bool:
        """May query q look at key k, in batch b and head h?"""
        return bool(self.allowed(grid, *(torch.tensor(i, device="cpu") for i in (b, h, q, k))))


class Unchanged:
    """A mask as the key of a cache.

    Two keys are equal if their masks are, and if no tensor of either mask was changed in place
    after its key was made.
    """

    def __init__(self, mask: Mask):
        self.mask, self._version = mask, mask.version()

    def _holds(self) -> bool:
        return self.mask.version() == self._version

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Unchanged) and self._holds() and other._holds()
        return same and self.mask == other.mask  # type: ignore[attr-defined]  # by `same`

    def __hash__(self) -> int:
        return hash(self.mask)


class CachedRanges(Mask):
    """A mask that stores its last key ranges, which take time and are the same in every layer.

    It stores none while torch traces or transforms. A CUDA graph refers to the memory of the ranges
    that it captured, so the mask holds those as long as it exists.
    """

    @abstractmethod
    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        """Compute `key_ranges`."""

    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        if not is_plain():
            return self.compute_key_ranges(grid, device)
        stream, version = stream_of(device), self.version()
        key, stream_of_cached, cached = self.__dict__.get("_cached", (None, None, None))
        if key == (grid, device, version) and stream in (stream_of_cached, None):
            if not has_values(cached.lo):
                self.__dict__.setdefault("_captured", set()).add(cached)
            return cached
        ranges = self.compute_key_ranges(grid, device)
        storable = type(ranges.lo) is Tensor and ranges.bits is None
        # Ranges captured in a CUDA graph have no values: its next replay overwrites their memory.
        if storable and not ranges.lo.is_inference() and has_values(ranges.lo):
            self.__dict__["_cached"] = (grid, device, version), stream, ranges
        return ranges


@dataclass(frozen=True, eq=False, repr=False)
class _OfParts(CachedRanges):
    """A mask made of other masks."""

    parts: tuple[Mask, ...]

    def sizes(self) -> dict[str, int]:
        return {name: size for part in self.parts for name, size in part.sizes().items()}

    def aligns(self) -> list[Align]:
        return [align for part in self.parts for align in part.aligns()]

    def with_align(self, align: Align) -> Mask:
        return replace(self, parts=tuple(part.with_align(align) for part in self.parts))

    def shifted(self, shift: Shift) -> Mask:
        return replace(self, parts=tuple(part.shifted(shift) for part in self.parts))

    def check(self, grid: Grid) -> None:
        for part in self.parts:
            part.check(grid)

    def must_fit(self, grid: Grid) -> None:
        for part in self.parts:
            part.must_fit(grid)


class _Composition(_OfParts):
    """Several masks, none of which is a composition of the same kind."""

    sign: ClassVar[str]
    word: ClassVar[str]
    decides: ClassVar[bool]  # the answer of one part that decides a cell alone

    def __repr__(self) -> str:
        # & binds tighter than |, so only an Or inside an And needs brackets.
        parts = (f"({p!r})" if isinstance(p, Or) else repr(p) for p in self.parts)
        return f" {self.sign} ".join(parts)

    @property
    def formula(self) -> str:
        return f" {self.word} ".join(f"({part.formula})" for part in self.parts)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        settling = [p for p in self.parts if p.allows(grid, b, h, q, k) == self.decides]
        return "; ".join(p.reason(grid, b, h, q, k) for p in settling or self.parts)


class And(_Composition):
    """Allows a cell if all parts allow it."""

    sign, word, decides = "&", "and", False

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return reduce(operator.and_, [part.allowed(grid, b, h, q, k) for part in self.parts])

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        bounds, ranges = [], []
        for part in self.parts:
            if (limits := part.bounds(grid, device)) is not None:
                bounds.append(limits)
            else:
                ranges.append(part.key_ranges(grid, device))
        if bounds:  # cheaper to intersect than ranges
            ranges.append(key_ranges.from_bounds(*_intersect(bounds), grid.Tq, grid.Tk, device))
        return reduce(operator.and_, ranges)

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds | None:
        bounds = [part.bounds(grid, device) for part in self.parts]
        return None if None in bounds else _intersect([b for b in bounds if b is not None])

    def band(self, grid: Grid) -> tuple[int, int] | None:
        bands = [part.band(grid) for part in self.parts]
        if None in bands:
            return None
        before, after = zip(*(band for band in bands if band is not None), strict=True)
        return min(before), min(after)


class Or(_Composition):
    """Allows a cell if at least one part allows it."""

    sign, word, decides = "|", "or", True

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return reduce(operator.or_, [part.allowed(grid, b, h, q, k) for part in self.parts])

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        ranges = self.parts[0].key_ranges(grid, device)
        for part in self.parts[1:]:
            ranges = ranges | part.key_ranges(grid, device)
        return ranges


class Not(_OfParts):
    """Allows a cell if its one part forbids it."""

    @property
    def mask(self) -> Mask:
        return self.parts[0]

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Composition) else f"~{self.mask!r}"

    @property
    def formula(self) -> str:
        return f"not ({self.mask.formula})"

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~self.mask.allowed(grid, b, h, q, k)

    def compute_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        if (bounds := self.bounds(grid, device)) is not None:
            return key_ranges.from_bounds(*bounds, grid.Tq, grid.Tk, device)
        return self.mask.key_ranges(grid, device).inverse()

    def bounds(self, grid: Grid, device: torch.device | None) -> Bounds | None:
        lo, hi = self.mask.bounds(grid, device) or (None, None)
        # The complement of a range is one range only if the range has a limit on one side alone.
        return (hi, lo) if (lo is None) != (hi is None) else None

    def band(self, grid: Grid) -> tuple[int, int] | None:
        before, after = self.mask.band(grid) or (UNLIMITED, UNLIMITED)
        if (before == UNLIMITED) == (after == UNLIMITED):  # the complement is not one range
            return None
        return (UNLIMITED, -before - 1) if after == UNLIMITED else (-after - 1, UNLIMITED)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"the opposite of: {self.mask.reason(grid, b, h, q, k)}"


def _intersect(bounds: Sequence[Bounds]) -> Bounds:
    lows, highs = ([x for x in side if x is not None] for side in zip(*bounds, strict=True))
    return (
        reduce(torch.maximum, lows) if lows else None,
        reduce(torch.minimum, highs) if highs else None,
    )


def _composed(kind: type[_Composition], a: Mask, b: Mask) -> Mask:
    """Compose the parts of both masks, each part once."""
    parts = _parts(a, kind)
    new = [x for x in _parts(b, kind) if not any(x.equals(part, read=False) for part in parts)]
    return kind((*parts, *new)) if new else a


def _parts(mask: Mask, kind: type[_Composition]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def common_align(mask: Mask, grid: Grid) -> int | Tensor | None:
    """Return the position of query 0 if all parts that have an alignment agree; else None."""
    offsets = {
        tuple(x.tolist()) if isinstance(x, Tensor) else shared_offset(x, grid): x
        for x in mask.aligns()
    }
    if len(offsets) != 1:
        return None
    ((offset, align),) = offsets.items()
    return align if isinstance(align, Tensor) else offset  # type: ignore[return-value]  # a tuple only of a tensor


def tensors_of(x: object) -> Iterator[Tensor]:
    """Yield all tensors of a mask and of its parts."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from tensors_of(part)
    elif isinstance(x, Mask):
        for field in fields(x):  # type: ignore[arg-type]  # every mask is a dataclass
            yield from tensors_of(getattr(x, field.name))


def _check_mask(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    gave = f"A mask was composed by {sign} with {type(other).__name__}."
    hint = "wrap booleans: dense(keep=tensor) if True means may look, else dense(drop=tensor)."
    raise BadType(gave, "masks compose only with masks.", hint)


def _equal(a: object, b: object, read: bool) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (read and a.shape == b.shape and bool((a == b.to(a.device)).all()))
    if isinstance(a, Mask) and isinstance(b, Mask):
        return a is b or a.equals(b, read)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_equal(*pair, read) for pair in zip(a, b, strict=True))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
