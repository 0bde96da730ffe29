"""Define biases, which are added to the scores before the mask: a tensor, or ALiBi.

Letters: B batch, H query heads, Tq queries, Tk keys.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..errors import BadType, BadValue, must_be_strided
from ..masks import Grid, Mask, values
from ..torch_state import is_plain, requires_grad

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of tensors of a problem


class Bias(ABC):
    """A number added to the score of every pair."""

    @abstractmethod
    def check(self, grid: Grid) -> None:
        """Raise `BadValue` if it does not fit these sizes."""

    @abstractmethod
    def block(self, grid: Grid, queries: slice | Tensor, keys: slice, like: Tensor) -> Tensor:
        """Compute the bias of a block, which broadcasts to (B, H, q, k), in the dtype of `like`.

        `queries` may be a tensor of positions.
        """

    @property
    def numbers(self) -> Tensor | None:
        """The tensor from the caller, if any."""
        return None

    @property
    def needs_grad(self) -> bool:
        return requires_grad(self.numbers)


@dataclass(frozen=True, eq=False)
class TensorBias(Bias):
    """A tensor that broadcasts to (B, H, Tq, Tk) and can have a gradient, from `bias(tensor)`."""

    tensor: Tensor

    def __repr__(self) -> str:
        return f"bias({'x'.join(map(str, self.tensor.shape))} {self.tensor.dtype})"

    @property
    def numbers(self) -> Tensor:
        return self.tensor

    def as_4d(self) -> Tensor:
        return values.as_4d(self.tensor)

    def within(self, dtype: torch.dtype) -> "TensorBias":
        """Convert to a narrower dtype, in which finite numbers stay finite."""
        x, most = self.tensor, torch.finfo(dtype).max
        if torch.finfo(x.dtype).max <= most:
            return self
        return TensorBias(torch.where(x.isinf(), x, x.clamp(-most, most)).to(dtype))

    def check(self, grid: Grid) -> None:
        values.check_broadcasts(
            self.tensor, grid, "bias has", "a bias",
            "a bias per head is (H, Tq, Tk), one per batch (B, 1, Tq, Tk)",
        )  # fmt: skip

    def block(self, grid: Grid, queries: slice | Tensor, keys: slice, like: Tensor) -> Tensor:
        part = self.as_4d()
        part = part if part.shape[2] == 1 else part[:, :, queries]
        part = part if part.shape[3] == 1 else part[..., keys]
        return part.to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """The bias ``-slope[h] * |q - k|``, which lowers the scores of distant keys, from `alibi(...)`.

    Under a causal mask ``|q - k|`` is q - k, as in the paper. Source: Press, Smith & Lewis 2021,
    "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation".
    """

    slopes: Tensor | None
    align: values.Align = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "align", values.as_align(self.align))

    def __repr__(self) -> str:
        slopes = "" if self.slopes is None else repr([round(s, 6) for s in self.slopes.tolist()])
        align = "" if self.align is None else f"align={values.format_numbers(self.align)}"
        return f"alibi({', '.join(part for part in (slopes, align) if part)})"

    @property
    def numbers(self) -> Tensor | None:
        return self.slopes

    def check(self, grid: Grid) -> None:
        if self.slopes is not None and self.slopes.shape[0] != 1 and self.slopes.shape[0] != grid.H:
            gave = f"alibi got {self.slopes.shape[0]} slopes for H={grid.H} heads."
            rule = "every query head has one slope."
            raise BadValue(gave, rule, f"pass {grid.H} slopes, or none for those of the paper.")
        values.check_batch(self, self.align, grid)
        values.check_align(self, self.align, grid, "alibi")

    def of(
        self, grid: Grid, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the slope of each head, (H,): by default 2^(-8/H), 2^(-16/H), ... as in the paper.

        They are in float64 on the CPU by default. Do not write to the result, which is shared.
        """
        if self.slopes is not None:
            return self.slopes.expand(grid.H).to(device=device, dtype=dtype)
        make = _cached_slopes if is_plain() else _paper_slopes
        return make(grid.H, device or torch.device("cpu"), dtype or torch.float64)

    def block(
        self, grid: Grid, queries: slice | Tensor, keys: slice | Tensor, like: Tensor
    ) -> Tensor:
        q = values.query_positions(self.align, grid, like.device)[..., queries]
        k = torch.arange(grid.Tk, device=like.device)[keys]
        distance = (q.unsqueeze(-1) - k).abs().to(like.dtype)
        slopes = self.of(grid, like.device, like.dtype)
        return -slopes.reshape(1, -1, 1, 1) * distance


def _paper_slopes(H: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    slopes = [2.0 ** (-8.0 * (i + 1) / H) for i in range(H)]
    return torch.tensor(slopes, dtype=torch.float64, device="cpu").to(device, dtype)


@cache
def _cached_slopes(H: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the slopes of the paper from a cache, because copying them to a GPU waits."""
    with torch.inference_mode(False):  # else training could not use slopes made by inference
        return _paper_slopes(H, device, dtype)


def bias(tensor: Tensor) -> TensorBias:
    """Make a bias from a floating tensor that broadcasts to (B, H, Tq, Tk), with 0 to 4 dimensions.

    It is added after scale and soft cap and before the mask; -inf blocks a pair. Raises `BadType`
    for booleans, whose True is not defined here, and for other dtypes, including float8.
    """
    if tensor is alibi:
        raise BadType("bias got the function alibi.", "it returns a bias.", "call it: alibi().")
    rule = "a bias is a tensor of fp16, bf16, fp32 or fp64 that is added to the scores."
    if isinstance(tensor, Mask):
        raise BadType(f"bias got the mask {tensor!r}.", rule, "pass a mask as mask=.")
    if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        hint = "pass tensor.float(), or booleans as mask=dense(keep=...) or mask=dense(drop=...)."
        raise BadType(f"bias got {kind}.", rule, hint)
    must_be_strided("bias", tensor)
    if tensor.dim() > 4:
        gave = f"bias got a tensor with {tensor.dim()} dimensions."
        raise BadValue(gave, "a bias broadcasts to (B, H, Tq, Tk).", "pass at most 4 dimensions.")
    return TensorBias(tensor)


def alibi(slopes: Tensor | list[float] | None = None, align: values.Align = None) -> Alibi:
    """Make an ALiBi bias, ``-slope[h] * |q - k|``.

    `slopes` holds one per query head, (H,); None means the slopes of the paper, 2^(-8/H),
    2^(-16/H), and so on. `align` is the position of query 0, as in `Causal`; None needs Tq = Tk.

    Raises `BadType` for slopes that are not real numbers, `BadValue` for more than one dimension.
    Source: Press, Smith & Lewis 2021, "Train Short, Test Long: Attention with Linear Biases
    Enables Input Length Extrapolation".
    """
    if slopes is None:
        return Alibi(None, align)
    try:
        numbers = slopes if isinstance(slopes, Tensor) else torch.as_tensor(slopes, device="cpu")
        if isinstance(slopes, list | tuple) and numbers.dtype == torch.get_default_dtype():
            # The default dtype would round them, unlike the slopes of the paper.
            numbers = torch.tensor(slopes, dtype=torch.float64, device="cpu")
        if not numbers.dim():
            raise TypeError("one number")
    except (TypeError, ValueError, RuntimeError) as error:
        gave, rule = f"alibi got slopes={slopes!r}.", "slopes are numbers, one per query head."
        hint = "pass a tensor or list of floats; alibi() has the paper's, for any number of heads."
        raise BadType(gave, rule, hint) from error
    must_be_strided("slopes", numbers)
    if numbers.is_complex() or numbers.dtype == torch.bool:
        rule = "slopes are real numbers, one per query head."
        hint = "pass a floating tensor or a list of floats, or none for those of the paper."
        raise BadType(f"alibi got slopes of {numbers.dtype}.", rule, hint)
    if numbers.dim() > 1:
        rule = "slopes are one per query head, (H,)."
        hint = "flatten them to one dimension."
        raise BadValue(f"alibi got slopes of shape {tuple(numbers.shape)}.", rule, hint)
    return Alibi(numbers, align)
