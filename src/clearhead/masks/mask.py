"""What a mask is, and what is made of masks: both, either, not.

Letters: B batch, H query heads, Tq queries, Tk keys; lower case for one index.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..errors import BadType, BadValue
from ..torch_state import is_plain
from .export import Exports, as_whole_number
from .grid import Grid
from .key_ranges import KeyRanges
from .values import Align, shared_offset, tensor


class Mask(Exports):
    """A rule that says which query may look at which key."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The rule in a line, in the letters q (query position) and k (key position)."""

    def band(self, grid: Grid) -> tuple[int, int] | None:
        """(before, after) if every query q sees the keys q - before to q + after in every batch and
        head, and else None. It is the whole rule where there is one, and needs no tensors."""
        return None

    @abstractmethod
    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        """The clause that decides this cell, for a reader."""

    def aligns(self) -> list[Align]:
        """Where its parts say that query 0 stands among the keys (`align=`)."""
        return []

    def with_align(self, align: Align) -> "Mask":
        """The same rule; parts that leave open where query 0 stands (`align=None`) take this."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return self if self._is(_mask(other, "&")) else And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return self if self._is(_mask(other, "|")) else Or(self, other)

    def __rand__(self, other: object) -> "Mask":
        return _mask(other, "&") & self

    def __ror__(self, other: object) -> "Mask":
        return _mask(other, "|") | self

    def __invert__(self) -> "Mask":
        return self.mask if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise BadType(
            f"{self!r} was used as a truth value, for example with `and`, `or` or `not`.",
            "masks compose cell by cell.",
            "write `a & b`, `a | b` or `~a`.",
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._fields_match(other, _same)

    def _is(self, other: "Mask") -> bool:
        """Equal for certain, with no tensor read."""
        if self is other or type(self) is not type(other):
            return self is other
        return self._fields_match(other, _certainly)

    def _fields_match(self, other: object, same: Callable[[object, object], bool]) -> bool:
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]  # every rule is a dataclass
        return all(same(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        held = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]  # as above
        return hash((type(self), *(x.shape if isinstance(x, Tensor) else x for x in held)))

    def __str__(self) -> str:
        grid = self._grid(None, None, None, None, default=8)
        return f"{self!r}: {self.formula}\n{self.picture(grid.Tq, grid.Tk)}"

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
        """Why query `q` may or may not look at key `k`: the answer and the rule that gave it.

        `Tq` and `Tk` are needed only by rules that count from the end; None means "as large as the
        pair asks, or as the rule itself fixes". Raises `BadValue` for a pair outside the sizes, and
        `BadType` for what is no whole number.
        """
        q, k, b, h = (as_whole_number(n, x) for n, x in (("q", q), ("k", k), ("b", b), ("h", h)))
        if min(q, k, b, h) < 0:
            raise BadValue(
                f"why was asked about query {q}, key {k}, batch {b}, head {h}.",
                "positions count from 0.",
                "ask for numbers from 0 on.",
            )
        grid = self._grid(Tq, Tk, None, None, default=max(q, k) + 1, at_least=(b, h))
        for name, index, size in (
            ("query", q, grid.Tq),
            ("key", k, grid.Tk),
            ("batch", b, grid.B),
            ("head", h, grid.H),
        ):
            if not 0 <= index < size:
                raise BadValue(
                    f"why was asked about {name} {index}, and there are {size}.",
                    "positions count from 0 and stay below the size.",
                    f"ask for a {name} from 0 to {size - 1}, or pass larger sizes Tq= and Tk=.",
                )
        verb = "may look" if self.allows(grid, b, h, q, k) else "may not look"
        return f"query {q} {verb} at key {k}: {self.reason(grid, b, h, q, k)}"

    def allows(self, grid: Grid, b: int, h: int, q: int, k: int) -> bool:
        """One cell."""
        return bool(self.allowed(grid, *(torch.tensor(i, device="cpu") for i in (b, h, q, k))))


class Kept(Mask):
    """A rule whose runs take a while to find. The layers of a model ask with one rule, so they are
    kept, unless a tracer or a transform is about."""

    @abstractmethod
    def find_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        """What `key_ranges` keeps."""

    def __getstate__(self) -> dict[str, object]:
        return {name: x for name, x in self.__dict__.items() if name != "_kept"}

    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        if not is_plain():
            return self.find_key_ranges(grid, device)
        kept = self.__dict__.get("_kept")
        if kept is not None and kept[0] == (grid, device):
            return kept[1]
        ranges = self.find_key_ranges(grid, device)
        if type(ranges.lo) is Tensor and ranges.bits is None and not ranges.lo.is_inference():
            object.__setattr__(self, "_kept", ((grid, device), ranges))
        return ranges


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Kept):
    left: Mask
    right: Mask

    def sizes(self) -> dict[str, int]:
        return {**self.left.sizes(), **self.right.sizes()}

    def aligns(self) -> list[Align]:
        return self.left.aligns() + self.right.aligns()

    def with_align(self, align: Align) -> Mask:
        return replace(self, left=self.left.with_align(align), right=self.right.with_align(align))

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)


class And(_Pair):
    """Both rules allow it."""

    def __repr__(self) -> str:
        return f"{_side(self.left, And)} & {_side(self.right, ())}"

    @property
    def formula(self) -> str:
        return f"({self.left.formula}) and ({self.right.formula})"

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(grid, b, h, q, k) & self.right.allowed(grid, b, h, q, k)

    def find_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        return self.left.key_ranges(grid, device) & self.right.key_ranges(grid, device)

    def band(self, grid: Grid) -> tuple[int, int] | None:
        left, right = self.left.band(grid), self.right.band(grid)
        if left is None or right is None:
            return None
        return min(left[0], right[0]), min(left[1], right[1])

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        both = (self.left, self.right)
        against = [m for m in both if not m.allows(grid, b, h, q, k)]
        return "; ".join(m.reason(grid, b, h, q, k) for m in against or both)


class Or(_Pair):
    """Either rule allows it."""

    def __repr__(self) -> str:
        return f"{_side(self.left, (And, Or))} | {_side(self.right, And)}"

    @property
    def formula(self) -> str:
        return f"({self.left.formula}) or ({self.right.formula})"

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.allowed(grid, b, h, q, k) | self.right.allowed(grid, b, h, q, k)

    def find_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        return self.left.key_ranges(grid, device) | self.right.key_ranges(grid, device)

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        both = (self.left, self.right)
        allow = [m for m in both if m.allows(grid, b, h, q, k)]
        return "; ".join(m.reason(grid, b, h, q, k) for m in allow or both)


@dataclass(frozen=True, eq=False, repr=False)
class Not(Kept):
    """The rule forbids it."""

    mask: Mask

    def __repr__(self) -> str:
        return f"~{_side(self.mask, ())}"

    @property
    def formula(self) -> str:
        return f"not ({self.mask.formula})"

    def sizes(self) -> dict[str, int]:
        return self.mask.sizes()

    def aligns(self) -> list[Align]:
        return self.mask.aligns()

    def with_align(self, align: Align) -> Mask:
        return replace(self, mask=self.mask.with_align(align))

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~self.mask.allowed(grid, b, h, q, k)

    def find_key_ranges(self, grid: Grid, device: torch.device | None) -> KeyRanges:
        return self.mask.key_ranges(grid, device).inverse()

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"the opposite of: {self.mask.reason(grid, b, h, q, k)}"


def _side(mask: Mask, is_plain: type | tuple[type, ...]) -> str:
    """A part of a composition; in brackets if it is one itself, unless its kind is `is_plain`."""
    bare = not isinstance(mask, _Pair) or isinstance(mask, is_plain)
    return repr(mask) if bare else f"({mask!r})"


def common_align(rule: Mask, grid: Grid) -> int | Tensor | None:
    """Where the parts of a mask let query 0 stand; None if they say nothing, or disagree."""
    corners = {
        tuple(x.tolist()) if isinstance(x, Tensor) else shared_offset(x, grid): x
        for x in rule.aligns()
    }
    if len(corners) != 1:
        return None
    ((place, corner),) = corners.items()
    return place if isinstance(place, int) else tensor(corner)


def _mask(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise BadType(
        f"A mask was composed by {sign} with {type(other).__name__}.",
        "masks compose with masks.",
        "wrap a boolean tensor first: dense(keep=tensor) if True means may look, "
        "dense(drop=tensor) if it means must not.",
    )


def _certainly(a: object, b: object) -> bool:
    if isinstance(a, Mask) and isinstance(b, Mask):
        return a._is(b)
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a == b.to(a.device)).all())
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
