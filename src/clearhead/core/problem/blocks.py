"""Tensors of keys or values in the blocks of ggml, as a cache of 8 or 4 bits stores them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import BadValue, did_you_mean, must_be_among
from .problem import Inputs

NUMBERS = 32  # of a block
BYTES = {"q8_0": 34, "q4_0": 18}  # of a block: a float16, and 8 or 4 bits for each number

_aten = torch.ops.aten
# Operations that move or copy vectors, with the position of their dimension.
_OF_VECTORS = {
    _aten.alias.default: None, _aten.detach.default: None, _aten.clone.default: None,
    _aten.slice.Tensor: 1, _aten.index_select.default: 1,
}  # fmt: skip


class BlockTensor(Tensor):
    """Numbers (..., D) that are stored in blocks of 32 of the last dimension.

    `stored` has the bytes, (..., D / 32 * 34) of uint8 for the format "q8_0", and 18 in place of 34
    for "q4_0". Operations see the numbers in the dtype of this tensor. Slices and selections of
    vectors are of this class; any other operation reads all numbers first. The core reads blocks in
    registers (`engines.cpu.blocks`).
    """

    stored: Tensor
    format: str

    @staticmethod
    def __new__(cls, stored: Tensor, format: str, dtype: torch.dtype) -> "BlockTensor":
        size = (*stored.shape[:-1], stored.shape[-1] // BYTES[format] * NUMBERS)
        blocks: BlockTensor = Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=stored.device
        )
        blocks.stored, blocks.format = stored, format
        return blocks

    def with_stored(self, stored: Tensor) -> "BlockTensor":
        """Return other vectors in the format and dtype of this tensor."""
        return BlockTensor(stored, self.format, self.dtype)

    def dequantize(self) -> Tensor:
        """Return the numbers as an ordinary tensor."""
        blocks = self.stored.unflatten(-1, (-1, BYTES[self.format]))
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        numbers = blocks[..., 2:]
        if self.format == "q8_0":
            numbers = numbers.contiguous().view(torch.int8).float()
        else:
            numbers = torch.cat([numbers & 15, numbers >> 4], -1).float() - 8
        return (numbers * scale).flatten(-2).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, x = kwargs or {}, args[0] if args else None
        if isinstance(x, BlockTensor) and function in _OF_VECTORS:
            dim = _OF_VECTORS[function]
            if dim is None or (args[dim] if len(args) > dim else 0) % x.dim() < x.dim() - 1:
                return x.with_stored(function(x.stored, *args[1:], **kwargs))
        if isinstance(x, BlockTensor) and function._schema.is_mutable:
            rule = "numbers in blocks are not changed in place."
            hint = "change a copy, x.dequantize()."
            raise BadValue(f"{function} would change a tensor in {x.format}.", rule, hint)
        args, kwargs = tree_map_only(BlockTensor, BlockTensor.dequantize, (args, kwargs))
        return function(*args, **kwargs)


def in_blocks(x: Tensor, format: str) -> BlockTensor:
    """Store numbers (..., D) in blocks, with the bits of ggml's reference quantisation; blocks of
    this format stay as they are.

    Raises `BadValue` for D that is not a multiple of 32.

    Source: ggml, `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`.
    """
    if isinstance(x, BlockTensor) and x.format == format:
        return x
    must_fill_blocks(x, format, "leave dtype out for heads of another size.")
    blocks = x.detach().float().unflatten(-1, (-1, NUMBERS))
    if format == "q8_0":
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        scaled = blocks * torch.where(scale == 0, 0.0, 1 / scale)
        # rounds x.5 away from 0, as roundf does
        numbers = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8).view(torch.uint8)
    else:
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = largest / -8
        # In float64, because ggml's compilers may fuse the product and the sum.
        shifted = blocks.double() * torch.where(scale == 0, 0.0, 1 / scale).double() + 8.5
        low, high = shifted.clamp(0, 15.9).to(torch.uint8).chunk(2, -1)
        numbers = low | high << 4
    scale = scale.half().clone(memory_format=torch.contiguous_format)
    stored = torch.cat([scale.view(torch.uint8), numbers], -1)
    return BlockTensor(stored.flatten(-2), format, x.dtype)


def must_fill_blocks(x: Tensor, format: str, hint: str) -> None:
    """Raise `BadValue` for vectors that are not entire blocks."""
    if x.shape[-1] % NUMBERS:
        gave = f"cache got vectors of {x.shape[-1]} numbers for {format!r}."
        raise BadValue(gave, f"ggml stores blocks of {NUMBERS} numbers of a head's vector.", hint)


def must_be_format(dtype: object) -> None:
    """Raise `BadValue` for an unknown format; None means none."""
    if dtype is not None:
        rule, hint = f"formats of blocks are {', '.join(BYTES)}.", did_you_mean(dtype, BYTES)
        must_be_among(BYTES, "dtype", dtype, rule, hint or "pass q8_0, or None.")


def read_back(inputs: Inputs) -> Inputs:
    """Return the inputs with ordinary tensors in place of blocks."""
    if not any(isinstance(x, BlockTensor) for x in inputs):  # as in most calls
        return inputs
    return Inputs(*tree_map_only(BlockTensor, BlockTensor.dequantize, tuple(inputs)))
