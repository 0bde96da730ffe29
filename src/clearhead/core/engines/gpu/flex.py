"""Compute attention by torch's FlexAttention, compiled, from the key ranges of the mask.

The functions passed to FlexAttention read key ranges, bits and biases from tensors. So one compiled
kernel serves all masks with the same number of ranges per query, and the block mask lists its
blocks without a matrix of queries x keys. The first call of a new kind compiles for seconds. The
tests call the functions on a CPU, without the compiler. On a GPU it was only timed, as a peer in
`bench.gpu`. `auto` does not choose it: on an H200 the Triton kernels are faster.
Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels".
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...masks.block_mask import block_mask
from ...masks.values import query_positions
from ...problem.biases import Alibi, TensorBias
from ...problem.problem import Inputs, Problem
from ...torch_state import in_forward_mode, in_transform, is_tracing
from ..devices import policy_of
from ..engine import Engine
from ..nonfinite import compute_cleaned, is_finite

Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = (128, 128)  # queries and keys, FlexAttention's own
MOST_KERNELS = 64  # torch's limit of compilations, raised


class Flex(Engine):
    """FlexAttention on a GPU; a caller must name it."""

    name = "flex"
    caption = "torch's FlexAttention, compiled, skipping the blocks that the mask leaves empty"

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        reasons = []
        if self.name not in policy_of(p.device).engines:
            return ["FlexAttention is used only on CUDA devices"]
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append("FlexAttention computes only float32, bfloat16 and float16")
        if p.dropout:
            reasons.append("FlexAttention has no dropout")
        if min(p.D, p.Dv) < 16:
            reasons.append("FlexAttention requires heads of size 16 or more")
        if p.bias is not None and not isinstance(p.bias, (Alibi, TensorBias)):
            reasons.append(f"FlexAttention does not support {p.bias!r}")
        if p.grad and p.bias is not None and p.bias.needs_grad:
            reasons.append("clearhead's call of FlexAttention has no gradient of a bias")
        if 0 in (p.B, p.H, p.Tq, p.Tk):
            reasons.append("FlexAttention accepts no empty tensors")
        if in_forward_mode():
            reasons.append("FlexAttention has no forward-mode derivatives")
        if in_transform() or is_tracing() or torch.compiler.is_compiling():
            reasons.append("FlexAttention is compiled alone, not inside another trace")
        return reasons

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        if not problem.masked or is_finite(*inputs):
            return _attend(problem, inputs)
        return compute_cleaned(problem, inputs, lambda clean: _attend(problem, clean))


def _attend(p: Problem, inputs: Inputs) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    options: dict[str, Any] = {"scale": p.scale, "enable_gqa": p.G != p.H}
    if p.masked:
        options["block_mask"] = block_mask(p.key_ranges, _mask_rule(p), BLOCK)
    if p.softcap is not None or p.bias is not None:
        options["score_mod"] = _score_rule(p)
    if p.sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    with torch._dynamo.config.patch(recompile_limit=MOST_KERNELS):
        result = compiled()(*inputs, **options)
    if p.sinks is None:
        return result
    out, aux = result
    sinks = p.sinks.to(p.wide).reshape(1, -1, 1)
    return (out * torch.sigmoid(aux.lse - sinks).unsqueeze(-1)).to(p.dtype)


@cache
def compiled() -> Callable[..., Any]:
    """Compile flex_attention as one graph; graph breaks would store queries x keys."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _mask_rule(p: Problem) -> Rule:
    """Return a function: whether query q of head h may look at key k, by key ranges and bits."""
    ranges = p.key_ranges
    shape = p.B, p.H, p.Tq
    lo, hi = (x.expand(*shape, -1) for x in (ranges.lo, ranges.hi))
    bits = None if ranges.bits is None else ranges.bits.expand(*shape, p.Tk)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (lo[b, h, q, 0] <= k) & (k < hi[b, h, q, 0])
        for j in range(1, lo.shape[-1]):
            inside = inside | ((lo[b, h, q, j] <= k) & (k < hi[b, h, q, j]))
        return inside if bits is None else inside & bits[b, h, q, k]

    return rule


def _score_rule(p: Problem) -> Callable[..., Tensor]:
    """Return a function that applies the soft cap and the bias to a score."""
    cap = None if p.softcap is None else torch.tensor(p.softcap, device=p.device)
    added = _added(p)

    def rule(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if added is None else score + added(b, h, q, k)

    return rule


def _added(p: Problem) -> Rule | None:
    """Return a function: the bias of a pair; None without a bias."""
    if isinstance(p.bias, Alibi):
        slopes = p.bias.of(p.grid, p.device, p.wide)
        positions = query_positions(p.bias.align, p.grid, p.device).expand(p.B, 1, p.Tq)
        return lambda b, h, q, k: -slopes[h] * (positions[b, 0, q] - k).abs()
    if isinstance(p.bias, TensorBias):
        numbers = p.bias.as_4d().to(p.device, p.wide).expand(p.B, p.H, p.Tq, p.Tk)
        return lambda b, h, q, k: numbers[b, h, q, k]
    return None
