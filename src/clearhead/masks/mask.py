"""What a mask is; `compose.py` has what is made of two.

Letters: B batch, H query heads, Tq queries, Tk keys; lower case for one index.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import BadType, BadValue
from ..intervals import Reach
from ..traced import plain
from ..whole import whole

if TYPE_CHECKING:
    from .numbers import Align

CPU = torch.device("cpu")  # where what is printed is found, whatever the default device


class Grid(NamedTuple):
    """How many queries and keys a mask is asked about, in how many batches and heads."""

    Tq: int
    Tk: int
    B: int = 1
    H: int = 1


class Mask(ABC):
    """A rule that says which query may look at which key."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The rule in a line, in the letters q (query position) and k (key position)."""

    @abstractmethod
    def keep(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The rule cell by cell: index tensors in (they broadcast), booleans out."""

    @abstractmethod
    def reach(self, grid: Grid, device: torch.device | None = None) -> Reach:
        """The rule as runs of keys per query, plus bits where runs cannot say it."""

    def diagonal(self, grid: Grid) -> tuple[int, int] | None:
        """(before, after) if every query q sees the keys q - before to q + after in every batch and
        head, and else None. It is the whole rule where there is one, and needs no tensors."""
        return None

    @abstractmethod
    def check(self, grid: Grid) -> None:
        """Raise `BadValue` if the rule has no meaning for these sizes."""

    @abstractmethod
    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        """The clause that decides this cell, for a reader."""

    def sizes(self) -> dict[str, int]:
        """The sizes that the rule itself fixes, of "B", "H", "Tq", "Tk"."""
        return {}

    def corners(self) -> "list[Align]":
        """Where its parts say that query 0 stands among the keys (`align=`)."""
        return []

    def aligned(self, align: "Align") -> "Mask":
        """The same rule; parts that leave open where query 0 stands (`align=None`) take this."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        from .compose import And

        return self if self._is(_mask(other, "&")) else And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        from .compose import Or

        return self if self._is(_mask(other, "|")) else Or(self, other)

    def __rand__(self, other: object) -> "Mask":
        return _mask(other, "&") & self

    def __ror__(self, other: object) -> "Mask":
        return _mask(other, "|") | self

    def __invert__(self) -> "Mask":
        from .compose import Not

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
        q, k, b, h = (_whole(n, x) for n, x in (("q", q), ("k", k), ("b", b), ("h", h)))
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
        return bool(self.keep(grid, *(torch.tensor(i, device="cpu") for i in (b, h, q, k))))

    def to_bool(
        self,
        Tq: int | None = None,
        Tk: int | None = None,
        *,
        B: int | None = None,
        H: int | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The mask written out, True = may look: (Tq, Tk), or (B, H or 1, Tq, Tk) if it differs
        between batches or heads. `Tk=None` means as many keys as queries, `Tq=None` the size that
        the rule itself fixes.
        """
        grid = self._grid(Tq, Tk, B, H)
        keep = self.reach(grid, device).block()
        return keep[0, 0] if keep.shape[:2] == (1, 1) else keep

    def to_additive(
        self,
        Tq: int | None = None,
        Tk: int | None = None,
        *,
        B: int | None = None,
        H: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """The mask as something to add to scores: 0 where allowed, -inf where not. Sizes as in
        `to_bool`. Raises `BadType` for a dtype that has no -inf."""
        if not dtype.is_floating_point:
            raise BadType(
                f"to_additive got dtype={dtype}.",
                "an additive mask holds 0 and -inf, which are floating-point numbers.",
                "pass a floating dtype; to_bool() gives booleans.",
            )
        keep = self.to_bool(Tq, Tk, B=B, H=H, device=device)
        return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(
            ~keep, float("-inf")
        )

    def to_flex(
        self,
        Tq: int | None = None,
        Tk: int | None = None,
        *,
        B: int | None = None,
        H: int | None = None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The mask as a `mask_mod(b, h, q, k)` for torch's FlexAttention. Sizes as in `to_bool`."""
        grid = self._grid(Tq, Tk, B, H)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.keep(grid, b, h, q, k)

        return mask_mod

    def tile(
        self,
        q: range,
        k: range,
        *,
        Tq: int | None = None,
        Tk: int | None = None,
        B: int | None = None,
        H: int | None = None,
    ) -> str:
        """ "empty", "full" or "partial": what the rule leaves of a block of queries and keys."""
        for name, run in (("q", q), ("k", k)):
            if not isinstance(run, range) or run.step != 1:
                raise BadType(
                    f"tile got {name}={run!r}.",
                    "a tile is a run of queries and a run of keys, ranges without a step.",
                    "pass for example range(0, 64).",
                )
        grid = self._grid(Tq, Tk, B, H, default=max(q.stop, k.stop))
        keep = self.reach(grid, CPU).block(slice(q.start, q.stop), slice(k.start, k.stop))
        return "full" if keep.all() else "partial" if keep.any() else "empty"

    def picture(self, Tq: int | None = None, Tk: int | None = None) -> str:
        """Rows are queries, columns keys: ■ may look, · may not, ▒ some may in that block."""
        grid = self._grid(Tq, Tk, None, None, default=8)
        reach = self.reach(grid, CPU)
        step = max(1, -(-max(grid.Tq, grid.Tk) // 32))
        rows = []
        for start in range(0, grid.Tq, step):
            some, full = reach.tiles(slice(start, start + step), step)
            marks = ("■" if f else "▒" if s else "·" for s, f in zip(some, full, strict=True))
            rows.append(" ".join(marks))
        return "\n".join(rows)

    def _grid(
        self,
        Tq: int | None,
        Tk: int | None,
        B: int | None,
        H: int | None,
        default: int | None = None,
        at_least: tuple[int, int] = (0, 0),
    ) -> Grid:
        known = self.sizes()
        Tq = known.get("Tq", default) if Tq is None else Tq
        if Tk is None:
            Tk = known.get("Tk", Tq if Tq is not None else default)
        Tq = Tk if Tq is None else Tq
        if Tq is None or Tk is None:
            raise BadValue(
                f"{self!r} does not know how many queries and keys there are.",
                "a rule over positions has no size of its own.",
                "pass them, for example mask.to_bool(5) or mask.to_bool(3, 10).",
            )
        B = known.get("B", at_least[0] + 1) if B is None else B
        H = known.get("H", at_least[1] + 1) if H is None else H
        sizes = (("Tq", Tq), ("Tk", Tk), ("B", B), ("H", H))
        grid = Grid(*(_whole(name, size) for name, size in sizes))
        if min(grid.Tq, grid.Tk, grid.B, grid.H) < 0:
            raise BadValue(
                f"{self!r} was asked about {grid}.",
                "sizes are 0 or more.",
                "pass how many queries, keys, batches and heads there are.",
            )
        self.check(grid)
        return grid


class Kept(Mask):
    """A rule whose runs take a while to find. The layers of a model ask with one rule, so they are
    kept, unless a tracer or a transform is about."""

    @abstractmethod
    def find_reach(self, grid: Grid, device: torch.device | None) -> Reach:
        """What `reach` keeps."""

    def __getstate__(self) -> dict[str, object]:
        return {name: x for name, x in self.__dict__.items() if name != "_kept"}

    def reach(self, grid: Grid, device: torch.device | None = None) -> Reach:
        if not plain():
            return self.find_reach(grid, device)
        kept = self.__dict__.get("_kept")
        if kept is not None and kept[0] == (grid, device):
            return kept[1]
        reach = self.find_reach(grid, device)
        if type(reach.lo) is Tensor and reach.bits is None and not reach.lo.is_inference():
            object.__setattr__(self, "_kept", ((grid, device), reach))
        return reach


def _whole(name: str, value: object) -> int:
    number = whole(value)
    if number is None:
        raise BadType(
            f"A mask was asked with {name}={value!r}.",
            "positions and sizes are whole numbers.",
            "pass an int.",
        )
    return number


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
