"""torch's FlexAttention, compiled, on the key ranges of the mask.

The rules handed to it read key ranges, bits and biases as tensors. So one compiled kernel serves
every mask with as many ranges a query, and the block mask lists its blocks without a matrix of
queries x keys. The first call of a kind compiles, for seconds. The tests run the rules without the
compiler, on a CPU; on a GPU this engine has not run yet, and `auto` does not choose it.
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
from ..engine import Engine
from ..nonfinite import answer_cleaned, is_finite

Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = (128, 128)  # queries and keys, FlexAttention's own
MOST_KERNELS = 64  # that are compiled before torch would refuse to compile another


class Flex(Engine):
    """FlexAttention on a GPU, by name only."""

    name = "flex"
    caption = "torch's FlexAttention, compiled, skipping the blocks that the mask leaves empty"

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        reasons = []
        if p.device.type != "cuda":
            return ["FlexAttention is used on CUDA devices"]
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append("FlexAttention computes fp32, bf16 and fp16")
        if p.dropout:
            reasons.append("FlexAttention has no dropout")
        if min(p.D, p.Dv) < 16:
            reasons.append("FlexAttention takes heads of 16 or more")
        if p.bias is not None and not isinstance(p.bias, (Alibi, TensorBias)):
            reasons.append(f"FlexAttention does not know {p.bias!r}")
        if p.grad and p.bias is not None and p.bias.needs_grad:
            reasons.append("a bias that learns gets no gradient from FlexAttention here")
        if 0 in (p.B, p.H, p.Tq, p.Tk):
            reasons.append("FlexAttention takes no empty tensors")
        if in_forward_mode():
            reasons.append("FlexAttention carries no forward-mode derivatives")
        if in_transform() or is_tracing() or torch.compiler.is_compiling():
            reasons.append("FlexAttention is compiled by itself, not inside of another trace")
        return reasons

    def skips_tiles(self, problem: Problem) -> bool:
        return True

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        if not problem.masked or is_finite(*inputs):
            return _attend(problem, inputs)
        return answer_cleaned(problem, inputs, lambda clean: _attend(problem, clean))


def _attend(p: Problem, inputs: Inputs) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest

    asked: dict[str, Any] = {"scale": p.scale, "enable_gqa": p.G != p.H}
    if p.masked:
        asked["block_mask"] = block_mask(p.key_ranges, _mask_rule(p), BLOCK)
    if p.softcap is not None or p.bias is not None:
        asked["score_mod"] = _score_rule(p)
    if p.sinks is not None:
        asked["return_aux"] = AuxRequest(lse=True)
    with torch._dynamo.config.patch(recompile_limit=MOST_KERNELS):
        answer = compiled()(*inputs, **asked)
    if p.sinks is None:
        return answer
    out, aux = answer
    sinks = p.sinks.to(p.wide).reshape(1, -1, 1)
    return (out * torch.sigmoid(aux.lse - sinks).unsqueeze(-1)).to(p.dtype)


@cache
def compiled() -> Callable[..., Any]:
    """flex_attention, compiled whole: in parts it would form queries x keys."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _mask_rule(p: Problem) -> Rule:
    """May query q of head h look at key k? By the ranges of the query, and bits."""
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
    """Soft cap and bias of a score."""
    cap = None if p.softcap is None else torch.tensor(p.softcap, device=p.device)
    added = _added(p)

    def rule(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if added is None else score + added(b, h, q, k)

    return rule


def _added(p: Problem) -> Rule | None:
    """The bias of a pair; None without one."""
    if isinstance(p.bias, Alibi):
        slopes = p.bias.of(p.grid, p.device, p.wide)
        places = query_positions(p.bias.align, p.grid, p.device).expand(p.B, 1, p.Tq)
        return lambda b, h, q, k: -slopes[h] * (places[b, 0, q] - k).abs()
    if isinstance(p.bias, TensorBias):
        numbers = p.bias.as_4d().to(p.device, p.wide).expand(p.B, p.H, p.Tq, p.Tk)
        return lambda b, h, q, k: numbers[b, h, q, k]
    return None
