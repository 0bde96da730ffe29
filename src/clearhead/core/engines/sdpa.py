"""torch's own scaled_dot_product_attention, called so that it computes what clearhead defines.

torch's kernels add -inf to masked scores and multiply values by a weight of 0, so NaN or infinity
of a masked key reaches the output or its gradient. `compute_cleaned` replaces such numbers by 0
before the call. Afterwards, a query that holds one or may look at one gets NaN.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from ..errors import BadValue
from ..problem.biases import TensorBias
from ..problem.nan_safe import cleaned
from ..problem.problem import Inputs, Problem
from ..torch_state import batches_gradients, has_values, in_forward_mode, in_transform
from .engine import CPU, CUDA, Engine, policy_of
from .sdpa_backends import (
    Gpu,
    backends_decline,
    gpu_of,
    hides_nothing,
    is_causal,
    listed,
    preferred,
)

FUSED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Sdpa(Engine):
    """torch's fused kernels, for problems that their masks and scales can express."""

    name = "sdpa"
    caption = "torch's scaled_dot_product_attention"

    def why_not(self, problem: Problem) -> list[str]:
        p = problem
        reasons = []
        if p.softcap is not None:
            reasons.append("torch has no soft cap")
        if p.sinks is not None:
            reasons.append("torch has no sinks")
        if in_forward_mode():
            reasons.append("torch's kernel carries no forward-mode derivatives")
        if p.dropout and p.seed is not None:
            reasons.append("torch's dropout takes no seed")
        if p.dropout and batches_gradients():
            reasons.append("torch has no dropout in a backward pass of is_grads_batched=True")
        if _needs_matrix(p):
            # Two bytes for booleans, and torch's copy as numbers (measured: 10 bytes in float64).
            need = (2 + p.dtype.itemsize) * p.all_pairs
            if need > policy_of(p.device).mask_bytes:
                reasons.append(f"would store the mask as a matrix of {need / 1e9:.1f} GB")
        if _on_gpu(p) and not _bias_is_exact(p):
            needed = f"on a GPU torch requires a bias in {p.dtype_name}"
            reasons.append(f"{needed}, which would round this one")
        if _on_gpu(p) and not reasons:
            reasons += self.forms_weights(p, gpu_of(p.device))
        return reasons

    def forms_weights(self, problem: Problem, gpu: Gpu) -> list[str]:
        """Return why torch has no fused kernel for the problem on this GPU, if its weights are so
        large that storing them is refused; else an empty list."""
        p = problem
        declined = backends_decline(p, gpu, _needs_matrix(p))
        if not all(declined.values()) or _weights_bytes(p) <= CUDA.weights_bytes:
            return []
        stored = f"without one torch would store weights of {_weights_bytes(p) / 1e9:.1f} GB"
        return [f"none of torch's fused kernels can compute it ({listed(declined)}), and {stored}"]

    def caption_of(self, problem: Problem) -> str:
        if not _on_gpu(problem):
            return self.caption
        declined = backends_decline(problem, gpu_of(problem.device), _needs_matrix(problem))
        order = preferred(gpu_of(problem.device))
        capable = [name for name in order if not declined[name]]
        return f"{self.caption}: {' or '.join(capable) or 'stores the weights'}"

    def skips_tiles(self, problem: Problem) -> bool:
        return problem.masked and not _needs_matrix(problem)

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        p = problem
        q, k, v = inputs
        if 0 in (p.B, p.H, p.Tq, p.Tk, p.Dv):
            # torch would multiply infinity by 0, and drop the gradient of a bias.
            true = torch.ones((), dtype=torch.bool, device=p.device)
            zeros = q.sum(-1, keepdim=True).masked_fill(true, 0.0) + k.sum() + v.sum()
            if p.bias is not None:
                zeros = zeros + _bias(p).sum()
            return zeros.expand(p.B, p.H, p.Tq, p.Dv).contiguous()
        if not _hides_keys(p):
            return _call_torch(p, q, k, v, {} if p.bias is None else {"attn_mask": _bias(p)})
        # In a graph for any length, torch accepts True but not the result of a comparison.
        causal: dict[str, object] = {} if _needs_matrix(p) else {"is_causal": True}
        if causal and is_finite(q, k, v):
            return _call_torch(p, q, k, v, causal)
        # torch's result for a fully masked query depends on the kernel. Here such a query is 0 and
        # sees every key during the call; `compute_cleaned` sets its output to 0 afterwards.
        rule = causal
        if not causal:
            fully_masked = (p.key_ranges.keys_per_query() == 0).unsqueeze(-1)
            keep = p.key_ranges.to_bool()
            rule = {"attn_mask": keep | fully_masked}
            if p.bias is not None:
                added = _bias(p).masked_fill(~keep, float("-inf"))
                rule = {"attn_mask": added.masked_fill(fully_masked, 0.0)}
        return compute_cleaned(p, inputs, lambda clean: _call_torch(p, *clean, rule))


def _on_gpu(p: Problem) -> bool:
    return p.device.type == "cuda"


def _hides_keys(p: Problem) -> bool:
    return p.masked and not (_on_gpu(p) and hides_nothing(p))


def _needs_matrix(p: Problem) -> bool:
    return p.bias is not None or (_hides_keys(p) and not is_causal(p))


def _call_torch(p: Problem, q: Tensor, k: Tensor, v: Tensor, rule: Mapping[str, object]) -> Tensor:
    if p.G != p.H:  # in a graph for any H, torch accepts True but not the result of a comparison
        rule = {**rule, "enable_gqa": True}
    # A float64 problem is often differentiated twice (gradgradcheck). On a CPU only torch's math
    # kernel, which stores the weights, can do so. It is also the only one with a gradient for a
    # bias, and inside a transform torch does not notice that the bias needs one.
    needs_math = p.dtype == torch.float64 or (p.bias is not None and in_transform())
    is_plain = (
        p.grad and needs_math and p.device.type == "cpu" and p.all_pairs * 8 <= CPU.weights_bytes
    )
    is_large = _on_gpu(p) and _weights_bytes(p) > CUDA.weights_bytes
    if is_large:  # torch's fused kernels require a contiguous last dimension
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))

    def call() -> Tensor:
        return torch_attention(q, k, v, dropout_p=p.dropout, scale=p.scale, **rule)  # type: ignore[arg-type]  # rules of several types

    if is_large:
        return _call_fused(p, call)
    if is_plain:
        with sdpa_kernel(SDPBackend.MATH):
            return call()
    return call()


def _call_fused(p: Problem, call: Callable[[], Tensor]) -> Tensor:
    """Call torch without its kernel that stores the weights, which it may prefer to a fused one.

    Raises `BadValue` if no fused kernel accepts the call.
    """
    enabled = gpu_of(p.device).enabled
    try:
        with sdpa_kernel([FUSED[name] for name in enabled]):
            return call()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        gave = f"None of torch's fused kernels ({', '.join(enabled)}) can compute {p.describe()}."
        rule = f"without one torch would store weights of {_weights_bytes(p) / 1e9:.1f} GB."
        hint = "read torch's warnings, pass engine='triton' or 'tiled', or enable other kernels."
        raise BadValue(gave, rule, hint) from error


def _weights_bytes(p: Problem) -> int:
    """Return the bytes of weights that torch would store on a GPU without a fused kernel."""
    return p.all_pairs * p.wide.itemsize


def _bias_is_exact(p: Problem) -> bool:
    """Return whether the bias is exact in the dtype of the queries, which torch's GPU kernels
    require."""
    dtype = p.bias.tensor.dtype if isinstance(p.bias, TensorBias) else p.wide
    return p.bias is None or p.dtype in (dtype, p.wide)


def _bias(p: Problem) -> Tensor:
    assert p.bias is not None
    like = torch.empty((), dtype=p.dtype if _on_gpu(p) else p.wide, device=p.device)
    block = p.bias.block(p.grid, slice(None), slice(None), like)
    if _on_gpu(p):  # torch's GPU kernels require contiguous keys
        block = block.expand(*block.shape[:3], p.Tk).contiguous()
    return block.expand(p.B, p.H, p.Tq, p.Tk)


def compute_cleaned(p: Problem, inputs: Inputs, compute: Callable[[Inputs], Tensor]) -> Tensor:
    """Return `compute` of the inputs without NaN and infinity, (B, H, Tq, Dv); NaN for a query that
    sees one, and 0 for a fully masked query."""
    q, k, v = inputs
    fully_masked = (p.key_ranges.keys_per_query() == 0).unsqueeze(-1)
    is_nan = _sees_nonfinite(p, k, v).unsqueeze(-1) | ~torch.isfinite(q).all(-1, keepdim=True)
    out = compute(Inputs(cleaned(q).masked_fill(fully_masked, 0.0), cleaned(k), cleaned(v)))
    return out.masked_fill(is_nan, float("nan")).masked_fill(fully_masked, 0.0)


def is_finite(*tensors: Tensor) -> bool:
    """Return whether the sum of each tensor is finite, which excludes NaN and infinity in it.

    It is False where values cannot be read without a wait: under a tracer, and on a GPU.
    """
    return has_values(*tensors) and all(
        policy_of(x.device).reads_values and bool(torch.isfinite(x.sum())) for x in tensors
    )


def _sees_nonfinite(p: Problem, k: Tensor, v: Tensor) -> Tensor:
    """Return whether each query may look at a key that holds NaN or infinity, (B, H, Tq). If the
    mask has no bits, this takes O(Tq x ranges)."""
    nonfinite = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1))
    nonfinite = nonfinite.repeat_interleave(p.H // max(p.G, 1), 1) if p.G != p.H else nonfinite
    if p.key_ranges.bits is not None:
        looks = p.key_ranges.to_bool().to(p.wide) @ nonfinite.to(p.wide).unsqueeze(-1)
        return (looks.squeeze(-1) > 0).expand(p.B, p.H, p.Tq)
    before = F.pad(nonfinite.long().cumsum(-1), (1, 0))
    ranges = p.key_ranges.lo.shape[-1]
    lo, hi = (
        before.gather(-1, edge.expand(p.B, p.H, p.Tq, ranges).flatten(2))
        for edge in (p.key_ranges.lo, p.key_ranges.hi)
    )
    return (hi > lo).unflatten(2, (p.Tq, ranges)).any(-1)
