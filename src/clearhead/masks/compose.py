"""Rules made of rules: both, either, not."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..intervals import Reach
from .mask import Grid, Kept, Mask

if TYPE_CHECKING:
    from .numbers import Align


@dataclass(frozen=True, eq=False, repr=False)
class _Pair(Kept):
    left: Mask
    right: Mask

    def sizes(self) -> dict[str, int]:
        return {**self.left.sizes(), **self.right.sizes()}

    def corners(self) -> "list[Align]":
        return self.left.corners() + self.right.corners()

    def aligned(self, align: "Align") -> Mask:
        return replace(self, left=self.left.aligned(align), right=self.right.aligned(align))

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

    def keep(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.keep(grid, b, h, q, k) & self.right.keep(grid, b, h, q, k)

    def find_reach(self, grid: Grid, device: torch.device | None) -> Reach:
        return self.left.reach(grid, device) & self.right.reach(grid, device)

    def diagonal(self, grid: Grid) -> tuple[int, int] | None:
        left, right = self.left.diagonal(grid), self.right.diagonal(grid)
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

    def keep(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.left.keep(grid, b, h, q, k) | self.right.keep(grid, b, h, q, k)

    def find_reach(self, grid: Grid, device: torch.device | None) -> Reach:
        return self.left.reach(grid, device) | self.right.reach(grid, device)

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

    def corners(self) -> "list[Align]":
        return self.mask.corners()

    def aligned(self, align: "Align") -> Mask:
        return replace(self, mask=self.mask.aligned(align))

    def check(self, grid: Grid) -> None:
        self.mask.check(grid)

    def keep(self, grid: Grid, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ~self.mask.keep(grid, b, h, q, k)

    def find_reach(self, grid: Grid, device: torch.device | None) -> Reach:
        return self.mask.reach(grid, device).inverse()

    def reason(self, grid: Grid, b: int, h: int, q: int, k: int) -> str:
        return f"the opposite of: {self.mask.reason(grid, b, h, q, k)}"


def _side(mask: Mask, plain: type | tuple[type, ...]) -> str:
    """A part of a composition; in brackets if it is one itself, unless its kind is `plain`."""
    bare = not isinstance(mask, _Pair) or isinstance(mask, plain)
    return repr(mask) if bare else f"({mask!r})"
