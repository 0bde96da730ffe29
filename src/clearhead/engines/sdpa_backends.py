"""Decide which of torch's fused kernels can compute a problem on a GPU.

The decision depends only on the problem and on a description of the GPU (`Gpu`), so it can be
planned and tested without a device. The rules are those of torch 2.13 for the backends of
`scaled_dot_product_attention`, and stricter where torch checks the version of cuDNN. If no backend
can, torch stores the weights, queries x keys.
"""

from typing import NamedTuple

import torch

from ..problem.problem import Problem

HALF = torch.float16, torch.bfloat16
BACKENDS = "cudnn", "flash", "efficient"  # the order of reports, not of speed
LATEST = 12, 1  # the latest compute capability that torch's kernels support


class Gpu(NamedTuple):
    """The properties of a GPU that the choice of a kernel depends on."""

    capability: tuple[int, int]  # of CUDA: (8, 0) is an A100, (9, 0) an H100
    cudnn: bool = True
    enabled: tuple[str, ...] = BACKENDS  # as torch.nn.attention.sdpa_kernel sets it


def gpu_of(device: torch.device) -> Gpu:
    """Describe a device of this machine, and which backends are enabled now."""
    switches = torch.backends.cuda
    on = {
        "cudnn": switches.cudnn_sdp_enabled(),
        "flash": switches.flash_sdp_enabled(),
        "efficient": switches.mem_efficient_sdp_enabled(),
    }
    return Gpu(
        torch.cuda.get_device_capability(device),
        torch.backends.cudnn.is_available(),
        tuple(name for name in BACKENDS if on[name]),
    )


# What `torch.compiler.assume_constant_result` sets, without importing the compiler.
gpu_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # an attribute of a function


def why_not_torch(problem: Problem, gpu: Gpu) -> str:
    """Return why one call of a torch fused kernel cannot compute the problem; empty if it can."""
    if problem.masked:
        return "torch's kernels need q, k and v cleaned of NaN, and most masks written out"
    if problem.bias is not None:
        return "torch's kernels need the bias written out"
    declined = backends_decline(problem, gpu, False)
    if not all(declined.values()):
        return ""
    return f"none of torch's fused kernels can compute it ({listed(declined)})"


def listed(declined: dict[str, list[str]]) -> str:
    """Return the backends and their reasons as text."""
    return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in declined.items())


def backends_decline(problem: Problem, gpu: Gpu, matrix: bool) -> dict[str, list[str]]:
    """Return for each of torch's fused kernels why it cannot compute the problem: an empty list if
    it can. `matrix`: whether the mask or the bias must be written out as a matrix."""
    return {name: _declines(name, problem, gpu, matrix) for name in BACKENDS}


def _declines(name: str, p: Problem, gpu: Gpu, matrix: bool) -> list[str]:
    reasons = []
    dtype = str(p.dtype).removeprefix("torch.")
    if name not in gpu.enabled:
        reasons.append("is disabled by torch.backends.cuda or sdpa_kernel")
    if p.dtype not in (HALF if name != "efficient" else (*HALF, torch.float32)):
        reasons.append(f"does not support {dtype}")
    least = (5, 0) if name == "efficient" and p.dtype != torch.bfloat16 else (8, 0)
    if not least <= gpu.capability <= LATEST:
        span = " to ".join(f"{major}.{minor}" for major, minor in (least, LATEST))
        reasons.append(f"needs a GPU of compute capability {span}")
    if name == "efficient":
        if p.G != p.H:
            reasons.append("does not support grouped heads")
        step = 4 if p.dtype == torch.float32 else 8
        if p.D % step or p.Dv % step:
            reasons.append(f"needs head sizes that are multiples of {step}")
    if name == "flash":
        if p.D != p.Dv:
            reasons.append("needs keys and values of the same size")
        if p.D > 256:
            reasons.append("needs head sizes up to 256")
        if matrix:
            reasons.append("does not support a mask as a matrix")
        if p.masked and p.Tq != p.Tk:
            reasons.append("supports a causal mask only if Tq = Tk")
        small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
        if p.grad and small and (192 < p.D <= 224 or (p.D > 224 and p.dropout)):
            reasons.append("has no gradient for this head size on this GPU")
    if name == "cudnn":
        if not gpu.cudnn:
            reasons.append("needs cuDNN")
        if max(p.D, p.Dv) > 128:
            reasons.append("needs head sizes up to 128")
        if p.D % 8 or p.Dv % 8:
            reasons.append("needs head sizes that are multiples of 8")
        if p.dropout:
            reasons.append("supports dropout only in some versions")
        if p.Tk == 1:
            reasons.append("needs more than one key")
    return reasons
