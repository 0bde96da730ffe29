"""Check and hold a number for every key, by which statistics multiply weights."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import BadType, BadValue, kind_of
from ..masks import Grid
from ..problem.problem import Problem
from ..torch_state import has_values

# A user passes numbers, or the name of numbers that `watch` computes.
Numbers: TypeAlias = "Tensor | PerKey | str | None"
# The norms of the values after the output projection, and of their differences from the first one.
VALUE, RELATIVE_VALUE = "value", "relative_value"


class PerKey:
    """Numbers n, (Tk,), (H, Tk) or (B, H, Tk); H and B may be 1. They are constants for autograd.

    Those with a `norm`, "value" or "relative_value", have no numbers until `watch` computes them
    for a call. Two are equal if they hold the same numbers, so that partial results can merge.
    `has_nan` is determined once, for numbers that must be `positive`: a GPU would wait.
    """

    def __init__(self, numbers: object, argument: str, *, positive: bool = False) -> None:
        self.argument = argument
        self.numbers: Tensor | None = None
        self.norm: str | None = None
        self.has_nan = False
        if isinstance(numbers, PerKey):
            self.numbers, self.norm = numbers.numbers, numbers.norm
            self.has_nan = numbers.has_nan
            return
        if isinstance(numbers, str) and numbers in (VALUE, RELATIVE_VALUE):
            self.norm = numbers
            return
        if not isinstance(numbers, Tensor) or numbers.dtype.is_complex:
            rule = "by= is a tensor with one real number for every key."
            hint = 'pass (Tk,), (H, Tk) or (B, H, Tk); in watch also "value" or "relative_value".'
            raise BadType(f"{argument} got {kind_of(numbers)}.", rule, hint)
        if not 1 <= numbers.dim() <= 3:
            rule = "by= has one number for every key: (Tk,), (H, Tk) or (B, H, Tk)."
            hint = "drop the other dimensions."
            raise BadValue(f"{argument} got a tensor of shape {tuple(numbers.shape)}.", rule, hint)
        if positive and not torch.compiler.is_compiling() and not has_values(numbers):
            rule = "meta tensors, vmap and the capture of a CUDA graph have no values to check."
            hint = "make the statistic before, from a tensor that has values."
            raise BadValue(f"{argument} got numbers that cannot be read now.", rule, hint)
        if positive and bool((numbers < 0).any()):
            rule = "this statistic needs numbers of 0 or more."
            hint = "pass absolute values, for example norms."
            raise BadValue(f"{argument} got a negative number.", rule, hint)
        self.has_nan = positive and bool(numbers.isnan().any())
        self.numbers = numbers.detach().reshape((1,) * (3 - numbers.dim()) + numbers.shape)

    def must_fit(self, grid: Grid) -> None:
        """Raise `BadValue` unless there is one number for each key of a call of these sizes."""
        if self.numbers is None:
            rule = "the norms of values depend on the output projection of a layer."
            hint = "use watch(model, stats=[...]), or pass a tensor with a number for every key."
            raise BadValue(f"{self.argument} got {self.norm!r} outside a model.", rule, hint)
        if self.numbers.shape[-1] != grid.Tk:
            gave = f"{self.argument} got {self.numbers.shape[-1]} numbers for {grid.Tk} keys."
            rule = "there is one number for every key."
            raise BadValue(gave, rule, f"pass {grid.Tk} numbers in the last dimension.")

    def of(self, p: Problem) -> Tensor:
        """Return the numbers for a problem as a view, (B, H, Tk), in the problem's wide dtype."""
        self.must_fit(p.grid)
        assert self.numbers is not None
        numbers = self.numbers.to(device=p.device, dtype=p.wide)
        for size, want, name in zip(numbers.shape, (p.B, p.H), "BH", strict=False):
            if size not in (1, want):
                gave = f"{self.argument} got a tensor of shape {tuple(numbers.shape)}."
                rule = f"the call has {name} = {want}: numbers are (Tk,), (H, Tk) or (B, H, Tk)."
                hint = "pass numbers for its query heads and batch, or the same for all."
                raise BadValue(gave, rule, hint)
        return numbers.expand(p.B, p.H, -1)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, PerKey) or self.numbers is None or other.numbers is None:
            same = isinstance(other, PerKey) and self.numbers is other.numbers
            return same and bool(self.norm == other.norm)
        return torch.equal(self.numbers, other.numbers)

    __hash__ = None  # type: ignore[assignment]  # tensors are compared by their numbers

    def __repr__(self) -> str:
        if self.numbers is None:
            return repr(self.norm)
        return f"<{' x '.join(map(str, self.numbers.shape))} numbers>"
