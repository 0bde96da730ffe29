"""The edit that reads keys and values as a cache returns them that stores fewer bits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from ....core.errors import BadType, BadValue, did_you_mean, kind_of, needs
from ....core.problem.blocks import BYTES, NUMBERS, in_blocks, must_fill_blocks
from ....core.problem.problem import Inputs, Problem
from .edit import Edit, Edited, EditSite, replaced

Format: TypeAlias = str | Callable[[Tensor], Tensor]

# The bits of a number. Those of ggml are in blocks of 32, with a float16, and in `_1` with two.
BITS = {
    "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5,
    "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
# The levels of iq4_nl, which are closer to each other near 0.
IQ4_NL = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, eq=False, repr=False)
class cache(Edit):
    """Read keys and values as a cache of this format returns them: rounded, and read back.

    Keys are rounded as attention receives them, after rotation and norm, as llama.cpp stores them.
    Each call rounds the exact keys anew, with the token's own, as if all were in the cache.

    =============  ====  ===================================================================
    format         bits  what it stores
    =============  ====  ===================================================================
    "bf16"         16    bfloat16
    "fp16"         16    float16, numbers beyond it as its largest
    "fp8_e4m3"     8     float8 e4m3 with scale 1, numbers beyond 448 as 448
    "q8_0"         8.5   of ggml: 32 numbers of a vector, 8 bits each, and one float16
    "q5_1"         6     5 bits each, a scale and an offset
    "q5_0"         5.5   5 bits each, a scale
    "q4_1"         5     4 bits each, a scale and an offset
    "q4_0"         4.5   4 bits each, a scale
    "iq4_nl"       4.5   4 bits each, one of 16 uneven levels, a scale
    a function           f(x), of keys or values (B, G, Tk, D), in the shape and dtype of x
    =============  ====  ===================================================================

    Args:
        keys: the format of keys; None means exact.
        values: the format of values, likewise.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of KV heads; -1 is the last, None means all.
        positions: positions of keys in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    No gradient flows through a named format. Raises `BadValue` for an unknown format, none at all,
    a vector that ggml cannot divide into blocks of 32, and what a function returns in another
    shape or dtype; `Missing` without the package gguf, for q5_1, q5_0 and q4_1.

    Source: ggml's reference quantisation, by gguf's ``quants``; Micikevicius et al. 2022, "FP8
    Formats for Deep Learning".
    """

    keys: Format | None = None
    values: Format | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keys", "values"):
            _check(name, getattr(self, name))
        if self.keys is None and self.values is None:
            rule = "it rounds keys, values or both."
            hint = 'pass for example cache(keys="q8_0", values="q8_0").'
            raise BadValue("cache got neither a format of keys nor of values.", rule, hint)

    @property
    def of_keys(self) -> bool:
        return True

    @property
    def bits(self) -> float | None:
        """The bits that a number takes, the mean of keys and values; None for a function, and where
        keys or values are exact."""
        keys, values = (BITS.get(str(x)) for x in (self.keys, self.values))
        return None if keys is None or values is None else (keys + values) / 2

    def arguments(self) -> list[str]:
        formats = {"keys": self.keys, "values": self.values}
        return [
            f"{name}={x!r}" if isinstance(x, str) else f"{name}={getattr(x, '__name__', x)}"
            for name, x in formats.items()
            if x is not None
        ]

    def edit_inputs(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        texts, heads = self.batch_of(problem), self.heads_of(problem)
        for name, form in (("k", self.keys), ("v", self.values)):
            if form is not None:
                x: Tensor = getattr(inputs, name)
                read = self._read_back(x[texts][:, heads], form)
                inputs = inputs._replace(**{name: replaced(self, x, read, problem, site)})
        return problem, inputs

    def _read_back(self, x: Tensor, form: Format) -> Tensor:
        if isinstance(form, str):
            return _of_dtype(x, DTYPES[form]) if form in DTYPES else _of_ggml(x, form)
        read = form(x)
        if not isinstance(read, Tensor) or (read.shape, read.dtype) != (x.shape, x.dtype):
            got = f"{tuple(read.shape)}, {read.dtype}" if isinstance(read, Tensor) else None
            rule = f"it returns the keys or values that it received: {tuple(x.shape)}, {x.dtype}."
            hint = "convert what it returns with .to(x)."
            raise BadValue(f"The format of {self!r} returned {got or kind_of(read)}.", rule, hint)
        return read


def _check(name: str, form: object) -> None:
    if form is None or callable(form) or form in BITS:
        return
    kind = BadValue if isinstance(form, str) else BadType
    rule = f"a format is {', '.join(BITS)}, or a function of a tensor."
    hint = did_you_mean(form, BITS) or 'pass for example "q8_0".'
    raise kind(f"cache got {name}={form!r}.", rule, hint)


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(x.dtype)


def _of_ggml(x: Tensor, form: str) -> Tensor:
    hint = f"use fp8_e4m3, or a function that pads the vectors to a multiple of {NUMBERS}."
    must_fill_blocks(x, form, hint)
    if form == "iq4_nl":
        return _of_iq4_nl(x)
    if form in BYTES:  # as `nn.KVCache` stores them
        return in_blocks(x, form).dequantize()
    with needs("hf", "formats of ggml are computed by the package gguf."):
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quantize
    kind = GGMLQuantizationType[form.upper()]
    stored = quantize(x.detach().float().cpu().contiguous().numpy(), kind)
    return torch.from_numpy(dequantize(stored, kind)).to(x)


def _of_iq4_nl(x: Tensor) -> Tensor:
    """Round as ggml's `quantize_row_iq4_nl_ref`, which its caches call.

    The number that is largest by its absolute value gets level -127, and the others the nearest
    level. Then the scale is that with the least squared error, weighted by squares.
    """
    levels = torch.tensor(IQ4_NL, dtype=torch.float32, device=x.device)
    blocks = x.detach().float().unflatten(-1, (-1, NUMBERS))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scaled = blocks * torch.where(largest == 0, 0.0, 1 / (largest / levels[0]))
    nearest = levels[torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, right=True)]
    weighted = blocks.square() * nearest
    # ggml adds one number after the other, in float32.
    top, bottom = (reduce(torch.add, (weighted * y).unbind(-1)) for y in (blocks, nearest))
    scale = (top / bottom).unsqueeze(-1).masked_fill(largest.abs() < 1e-15, 0.0).half()
    return (nearest * scale.float()).flatten(-2).to(x)
