"""torch's own scaled_dot_product_attention, called so that it computes what clearhead defines."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Bound at import, so that this engine does not call itself when a user puts clearhead in the place
# of F.scaled_dot_product_attention.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from ..errors import BadValue
from ..masks.key_ranges import UNLIMITED
from ..problem.biases import TensorBias
from ..problem.problem import Inputs, Problem
from ..torch_state import batches_gradients, in_forward_mode, in_transform
from .engine import Engine
from .nonfinite import answer_cleaned, is_finite
from .sdpa_backends import Gpu, backends_decline, gpu_of, listed

# What a mask as a matrix may take. On a CPU `tiled` answers beyond, in 0.3 to 1.7 of the time.
MOST_MASK_BYTES, MOST_ELSEWHERE = 2**28, 2**32
MOST_UNFUSED_BYTES = 2**26  # of weights that torch forms on a GPU where it has no fused kernel
MOST_WEIGHTS_BYTES = 2**30  # of float64 that is differentiated
FUSED = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Sdpa(Engine):
    """torch's fused kernels, where their masks and scales say the same as the problem."""

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
            reasons.append("torch draws nothing in a backward pass of is_grads_batched=True")
        if _needs_matrix(p):
            # Booleans twice, and the numbers torch makes of them (measured: 10 bytes in float64).
            need = (2 + p.dtype.itemsize) * p.all_pairs
            if need > (MOST_MASK_BYTES if p.device.type == "cpu" else MOST_ELSEWHERE):
                reasons.append(f"would write the mask out as a matrix of {need / 1e9:.1f} GB")
        if _on_gpu(p) and not _bias_is_exact(p):
            kind = str(p.dtype).removeprefix("torch.")
            reasons.append(f"on a GPU torch takes a bias in {kind}, which would round this one")
        if _on_gpu(p) and not reasons:
            reasons += self.forms_weights(p, gpu_of(p.device))
        return reasons

    def forms_weights(self, problem: Problem, gpu: Gpu) -> list[str]:
        """On this GPU torch has no fused kernel for it, and what it would form is large: why."""
        p = problem
        said = backends_decline(p, gpu, _needs_matrix(p))
        if not all(said.values()) or _weights_bytes(p) <= MOST_UNFUSED_BYTES:
            return []
        return [
            f"no fused kernel of torch takes it ({listed(said)}), and without one torch would form "
            f"weights of {_weights_bytes(p) / 1e9:.1f} GB"
        ]

    def caption_of(self, problem: Problem) -> str:
        if not _on_gpu(problem):
            return self.caption
        said = backends_decline(problem, gpu_of(problem.device), _needs_matrix(problem))
        able = [name for name, reasons in said.items() if not reasons]
        return f"{self.caption}: {' or '.join(able) or 'forms the weights'}"

    def skips_tiles(self, problem: Problem) -> bool:
        return problem.masked and not _needs_matrix(problem)

    def compute(self, problem: Problem, inputs: Inputs) -> Tensor:
        p = problem
        q, k, v = inputs
        if 0 in (p.B, p.H, p.Tq, p.Tk, p.Dv):
            # torch multiplies by 0 what may be infinite, and forgets that a bias learns.
            every = torch.ones((), dtype=torch.bool, device=p.device)
            nothing = q.sum(-1, keepdim=True).masked_fill(every, 0.0) + k.sum() + v.sum()
            if p.bias is not None:
                nothing = nothing + _bias(p).sum()
            return nothing.expand(p.B, p.H, p.Tq, p.Dv).contiguous()
        if not p.masked:
            return _call_torch(p, q, k, v, {} if p.bias is None else {"attn_mask": _bias(p)})
        # In a graph for any length, torch takes True and not the comparison.
        causal: dict[str, object] = {} if _needs_matrix(p) else {"is_causal": True}
        if causal and is_finite(q, k, v):
            return _call_torch(p, q, k, v, causal)
        # A blind query looks at every key meanwhile, as 0, because torch's answer to a row without
        # keys depends on the kernel.
        rule = causal
        if not causal:
            sees_nothing = (p.key_ranges.keys_per_query() == 0).unsqueeze(-1)
            keep = p.key_ranges.to_bool()
            rule = {"attn_mask": keep | sees_nothing}
            if p.bias is not None:
                added = _bias(p).masked_fill(~keep, float("-inf"))
                rule = {"attn_mask": added.masked_fill(sees_nothing, 0.0)}
        return answer_cleaned(p, inputs, lambda clean: _call_torch(p, *clean, rule))


def _on_gpu(p: Problem) -> bool:
    return p.device.type == "cuda"


def _is_causal(p: Problem) -> bool:
    # torch's fused kernel scales its own -inf, which a scale that rounds to 0 or below turns over.
    return p.scale > 1e-30 and p.mask.band(p.grid) == (UNLIMITED, 0)


def _needs_matrix(p: Problem) -> bool:
    return p.bias is not None or (p.masked and not _is_causal(p))


def _call_torch(p: Problem, q: Tensor, k: Tensor, v: Tensor, rule: Mapping[str, object]) -> Tensor:
    if p.G != p.H:  # in a graph for any H, torch takes True and not the comparison
        rule = {**rule, "enable_gqa": True}
    # What is computed in float64 is often differentiated twice (gradgradcheck). Of torch's kernels
    # on a CPU only the one that forms the weights knows how. It also is the one for a bias that
    # learns; inside a transform torch does not see that it does.
    needs_math = p.dtype == torch.float64 or (p.bias is not None and in_transform())
    is_plain = p.grad and needs_math and p.device.type == "cpu" and _weights_fit(p)
    is_large = _on_gpu(p) and _weights_bytes(p) > MOST_UNFUSED_BYTES
    if is_large:  # its fused kernels want features next to each other
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
    """Call torch without its kernel that forms the weights, which it may put before a fused one.

    Raises `BadValue` where no fused kernel takes it, as torch does by then.
    """
    enabled = gpu_of(p.device).enabled
    try:
        with sdpa_kernel([FUSED[name] for name in enabled]):
            return call()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise BadValue(
            f"None of torch's fused kernels ({', '.join(enabled)}) took this: {p.describe()}.",
            f"without one torch would form weights of {_weights_bytes(p) / 1e9:.1f} GB, which is "
            "not done silently; torch's warnings say what each kernel wants.",
            "pass engine='triton' or engine='tiled', or enable the others of torch's kernels.",
        ) from error


def _weights_fit(p: Problem) -> bool:
    return p.all_pairs * 8 <= MOST_WEIGHTS_BYTES


def _weights_bytes(p: Problem) -> int:
    """What torch would write on a GPU where it has no fused kernel."""
    return p.all_pairs * p.wide.itemsize


def _bias_is_exact(p: Problem) -> bool:
    """Is it the same in the dtype of the queries, in which torch's kernels on a GPU take it?"""
    held = p.bias.tensor.dtype if isinstance(p.bias, TensorBias) else p.wide
    return p.bias is None or p.dtype in (held, p.wide)


def _bias(p: Problem) -> Tensor:
    assert p.bias is not None
    like = torch.empty((), dtype=p.dtype if _on_gpu(p) else p.wide, device=p.device)
    block = p.bias.block(p.grid, slice(None), slice(None), like)
    if _on_gpu(p):  # torch's kernels want keys next to each other there
        block = block.expand(*block.shape[:3], p.Tk).contiguous()
    return block.expand(p.B, p.H, p.Tq, p.Tk)
