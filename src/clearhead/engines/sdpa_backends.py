"""A GPU described, and which of torch's fused kernels it can use: a function of the problem and the
description alone, so that the choice can be read, planned and tested without a device.

The rules are those of torch 2.13 for `scaled_dot_product_attention` and its backends, and stricter
where torch asks for the version of cuDNN; the device itself is not asked. Where no backend can,
torch forms the weights, queries x keys.
"""

from typing import NamedTuple

import torch

from ..problem.problem import Problem

HALF = torch.float16, torch.bfloat16
BACKENDS = "cudnn", "flash", "efficient"  # in the order in which they are named, not of speed
LATEST = 12, 1  # compute capability that torch's kernels were made for


class Gpu(NamedTuple):
    """What the choice depends on."""

    capability: tuple[int, int]  # of CUDA: (8, 0) is an A100, (9, 0) an H100
    cudnn: bool = True
    enabled: tuple[str, ...] = BACKENDS  # as torch.nn.attention.sdpa_kernel sets it


def gpu_of(device: torch.device) -> Gpu:
    """The description of a device that is there, and of the backends that are enabled now."""
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
gpu_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def why_not_torch(problem: Problem, gpu: Gpu) -> str:
    """Why this does not come down to one call of a fused kernel of torch; empty if it does."""
    if problem.masked:
        return "torch's would need q, k and v cleaned of NaN, and most masks written out"
    if problem.bias is not None:
        return "torch's would need the bias written out"
    said = backends_decline(problem, gpu, False)
    return "" if not all(said.values()) else f"no fused kernel of torch takes it ({listed(said)})"


def listed(said: dict[str, list[str]]) -> str:
    return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in said.items())


def backends_decline(problem: Problem, gpu: Gpu, matrix: bool) -> dict[str, list[str]]:
    """Why each of torch's fused kernels cannot answer; an empty list means that it can. `matrix`
    says whether the problem needs its mask or bias written out as a matrix."""
    return {name: _declines(name, problem, gpu, matrix) for name in BACKENDS}


def _declines(name: str, p: Problem, gpu: Gpu, matrix: bool) -> list[str]:
    reasons = []
    kind = str(p.dtype).removeprefix("torch.")
    if name not in gpu.enabled:
        reasons.append("disabled by torch.backends.cuda or sdpa_kernel")
    if p.dtype not in (HALF if name != "efficient" else (*HALF, torch.float32)):
        reasons.append(f"no {kind}")
    least = (5, 0) if name == "efficient" and p.dtype != torch.bfloat16 else (8, 0)
    if not least <= gpu.capability <= LATEST:
        span = " to ".join(f"{major}.{minor}" for major, minor in (least, LATEST))
        reasons.append(f"a GPU of compute capability {span}")
    if name == "efficient":
        if p.G != p.H:
            reasons.append("no grouped heads")
        step = 4 if p.dtype == torch.float32 else 8
        if p.D % step or p.Dv % step:
            reasons.append(f"heads of a multiple of {step}")
    if name == "flash":
        if p.D != p.Dv:
            reasons.append("keys and values of one size")
        if p.D > 256:
            reasons.append("heads of up to 256")
        if matrix:
            reasons.append("no mask as a matrix")
        if p.masked and p.Tq != p.Tk:
            reasons.append("a causal mask only with Tq = Tk")
        small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
        if p.grad and small and (192 < p.D <= 224 or (p.D > 224 and p.dropout)):
            reasons.append("on this GPU no gradient for heads of this size")
    if name == "cudnn":
        if not gpu.cudnn:
            reasons.append("cuDNN")
        if max(p.D, p.Dv) > 128:
            reasons.append("heads of up to 128")
        if p.D % 8 or p.Dv % 8:
            reasons.append("heads of a multiple of 8")
        if p.dropout:
            reasons.append("dropout only in some versions")
        if p.Tk == 1:
            reasons.append("more than one key")
    return reasons
