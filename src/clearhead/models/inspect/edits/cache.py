"""The edit that reads keys and values as a cache returns them that stores fewer bits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from ....core.errors import BadType, BadValue, as_count, did_you_mean, kind_of, needs
from ....core.functional.divergence import mixed
from ....core.masks import Mask, documents, window
from ....core.problem.blocks import BYTES, NUMBERS, in_blocks, must_fill_blocks
from ....core.problem.problem import Inputs, Problem
from .edit import Edit, Edited, EditSite, replaced

Format: TypeAlias = str | Callable[[Tensor], Tensor]

# The bits of a number. Those of ggml are in blocks of 32, with a float16, and in `_1` with two, as
# in the groups of KIVI.
BITS = {
    "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5,
    "q4_0": 4.5, "iq4_nl": 4.5, "kivi4": 5, "kivi2": 3,
}  # fmt: skip
# The levels of iq4_nl, which are closer to each other near 0.
IQ4_NL = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
KIVI = {"kivi4": 15, "kivi2": 3}  # steps from the least to the largest number of a group
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
    "kivi4"        5     of KIVI: groups of 32, 16 even steps from the least to the largest
    "kivi2"        3     likewise, 4 steps
    a function           f(x), of keys or values (B, G, Tk, D), in the shape and dtype of x
    =============  ====  ===================================================================

    Args:
        keys: the format of keys; None means exact.
        values: the format of values, likewise.
        residual: KIVI's R: a query reads the exact values of the last R tokens, with its own, and
            the exact keys since the last multiple of R tokens. None rounds each token at once.
        layers: numbers of layers, or patterns for module names such as ``"*.5.*"``; None means all.
        heads: indices of KV heads; -1 is the last, None means all.
        positions: positions of keys in the text, from 0; -1 is the last, None means all.
        batch: a range of texts of the batch, such as ``range(0, 2)``; None means all.

    KIVI groups 32 tokens of a channel in keys, and 32 channels of a token in values. A residual
    replaces the output of earlier edits by that of partial calls, and is refused under autograd.

    No gradient flows through a named format. Raises `BadValue` for an unknown format, none at all,
    a vector that ggml cannot divide into blocks of 32, and what a function returns in another
    shape or dtype; `Missing` without the package gguf, for q5_1, q5_0 and q4_1.

    Source: ggml's reference quantisation, by gguf's ``quants``; Micikevicius et al. 2022, "FP8
    Formats for Deep Learning"; Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization
    for KV Cache".
    """

    keys: Format | None = None
    values: Format | None = None
    residual: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keys", "values"):
            _check(name, getattr(self, name))
        if self.keys is None and self.values is None:
            rule = "it rounds keys, values or both."
            hint = 'pass for example cache(keys="q8_0", values="q8_0").'
            raise BadValue("cache got neither a format of keys nor of values.", rule, hint)
        if self.residual is not None:
            rule, hint = "it is a number of tokens, from 1 on.", "pass for example residual=128."
            as_count("cache got residual", self.residual, rule, hint, 1)

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
        formats = {"keys": self.keys, "values": self.values, "residual": self.residual}
        return [
            f"{name}={x!r}" if isinstance(x, str) else f"{name}={getattr(x, '__name__', x)}"
            for name, x in formats.items()
            if x is not None
        ]

    def edit_inputs(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        return problem, inputs if self.residual else self.rounded(problem, inputs, site)

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, site: EditSite) -> Tensor:
        """Return the output with a residual. Raises `BadValue` where autograd records."""
        if not self.residual:
            return out
        if problem.records_grad:
            rule = "rounded keys and values beside exact ones have no gradient."
            raise BadValue(f"Autograd records a call with {self!r}.", rule, "use torch.no_grad().")
        rounded, exact = self.rounded(problem, inputs, site), self.exact(problem, site)
        texts, heads = self.batch_of(problem), torch.arange(problem.H).view(problem.G, -1)
        at = torch.tensor(texts).unsqueeze(1), heads[self.heads_of(problem)].flatten()
        return out.index_put(at, mixed(problem, inputs, rounded, exact)[at])

    def for_copy(self, batch: range) -> Edit | None:
        return None if self.residual else super().for_copy(batch)

    def visible_problem(self, problem: Problem, inputs: Inputs, site: EditSite) -> Edited:
        """Return them; raises `BadValue` with a residual, whose weights are of several calls."""
        if self.residual:
            rule = "with residual= a query has weights on exact and on rounded keys."
            hint = "use compare_caches, or ch.divergence with exact_mask=."
            raise BadValue(f"{self!r} was watched.", rule, hint)
        return problem, inputs

    def rounded(self, problem: Problem, inputs: Inputs, site: EditSite) -> Inputs:
        """Return the inputs with all selected keys and values as they are read back."""
        texts, heads = self.batch_of(problem), self.heads_of(problem)
        first = site.at.real_keys(problem.Tk)[0]
        starts = [first[b] if isinstance(first, tuple) else first for b in texts]
        for name, form in (("k", self.keys), ("v", self.values)):
            if form is not None:
                x: Tensor = getattr(inputs, name)
                read = self._read_back(x[texts][:, heads], form, starts if name == "k" else None)
                inputs = inputs._replace(**{name: replaced(self, x, read, problem, site)})
        return inputs

    def exact(self, problem: Problem, site: EditSite) -> tuple[Mask, Mask]:
        """Return the pairs of which a query reads the exact key, and those of the exact value.
        Raises `BadValue` if the position of its query is unknown."""
        residual, (start, first) = self.residual or 0, (site.at.start, site.at.first_key)
        if start is None:
            raise self._unknown_position(problem)
        query, key = (
            torch.arange(size) + torch.tensor(at).reshape(-1, 1)
            for at, size in ((start, problem.Tq), (first, problem.Tk))
        )
        of_keys = documents(key // residual, queries=(query + 1) // residual)
        align = (query[:, 0] - key[:, 0]).squeeze()  # one number if all texts have the same
        return of_keys, window(before=residual - 1, after=0, align=align)

    def _read_back(self, x: Tensor, form: Format, starts: list[int] | None = None) -> Tensor:
        """Round keys, whose texts begin at the columns `starts`, or values."""
        if form in KIVI:
            return _of_kivi(x, KIVI[form], starts)
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


def _of_kivi(x: Tensor, steps: int, starts: list[int] | None) -> Tensor:
    """Round to even steps between the least and the largest of 32 channels of a token; with
    `starts`, of a channel of 32 tokens, from there on."""
    read, dim = x.detach().clone(), -1
    groups: Iterable[Tensor] = read.split(NUMBERS, -1)
    if starts is not None:
        texts, dim = zip(read, starts, strict=True), 1
        groups = (y for text, start in texts for y in text[:, start:].split(NUMBERS, 1))
    for y in groups:
        low, high = y.float().aminmax(dim=dim, keepdim=True)
        step = (high - low) / steps
        y.copy_(low + step * ((y - low) / step).round().nan_to_num(0.0))  # 0 / 0: all are equal
    return read


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
