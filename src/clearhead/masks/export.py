"""What a mask can be written out as: booleans, something to add, a FlexAttention rule, a picture.

All of it comes from a mask's key ranges, or from its rule cell by cell; `Mask` inherits it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import BadType, BadValue, whole_number
from .grid import Grid
from .key_ranges import KeyRanges

CPU = torch.device("cpu")  # where what is printed is found, whatever the default device


class Exports(ABC):
    """A rule over positions: what it says of every pair, and what it can be written out as."""

    @abstractmethod
    def allowed(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The rule cell by cell: index tensors in (they broadcast), booleans out."""

    @abstractmethod
    def key_ranges(self, grid: Grid, device: torch.device | None = None) -> KeyRanges:
        """The rule as runs of keys per query, plus bits where runs cannot say it."""

    @abstractmethod
    def check(self, grid: Grid) -> None:
        """Raise `BadValue` if the rule has no meaning for these sizes."""

    def sizes(self) -> dict[str, int]:
        """The sizes that the rule itself fixes, of "B", "H", "Tq", "Tk"."""
        return {}

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
        keep = self.key_ranges(grid, device).to_bool()
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
            return self.allowed(grid, b, h, q, k)

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
        keep = self.key_ranges(grid, CPU).to_bool(slice(q.start, q.stop), slice(k.start, k.stop))
        return "full" if keep.all() else "partial" if keep.any() else "empty"

    def picture(self, Tq: int | None = None, Tk: int | None = None) -> str:
        """Rows are queries, columns keys: ■ may look, · may not, ▒ some may in that block."""
        grid = self._grid(Tq, Tk, None, None, default=8)
        ranges = self.key_ranges(grid, CPU)
        step = max(1, -(-max(grid.Tq, grid.Tk) // 32))
        rows = []
        for start in range(0, grid.Tq, step):
            some, full = ranges.tiles(slice(start, start + step), step)
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
        grid = Grid(*(as_whole_number(name, size) for name, size in sizes))
        if min(grid.Tq, grid.Tk, grid.B, grid.H) < 0:
            raise BadValue(
                f"{self!r} was asked about {grid}.",
                "sizes are 0 or more.",
                "pass how many queries, keys, batches and heads there are.",
            )
        self.check(grid)
        return grid


def as_whole_number(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None:
        raise BadType(
            f"A mask was asked with {name}={value!r}.",
            "positions and sizes are whole numbers.",
            "pass an int.",
        )
    return number
