"""Decide which of torch's fused kernels can compute a problem on a GPU.

The decision depends only on the problem and on a description of the GPU (`Gpu`), so it can be
planned and tested without a device. The rules are those of torch 2.13 for the backends of
`scaled_dot_product_attention`, and stricter where torch checks the version of cuDNN. If no backend
can, torch stores the weights, queries x keys.
"""

from functools import cache
from typing import NamedTuple

import torch

from ..masks.key_ranges import UNLIMITED
from ..problem.problem import Problem

HALF = torch.float16, torch.bfloat16
BACKENDS = "cudnn", "flash", "efficient"
LATE_CUDNN = "flash", "cudnn", "efficient"
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
        capability_of(device),
        torch.backends.cudnn.is_available(),
        tuple(name for name in BACKENDS if on[name]),
    )


# What `torch.compiler.assume_constant_result` sets, without importing the compiler.
gpu_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # an attribute of a function


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a device. torch's function takes microseconds a call."""
    return torch.cuda.get_device_capability(device)


def is_causal(p: Problem) -> bool:
    """Is the mask torch's `is_causal`, which counts queries and keys from the first?

    torch's fused kernels multiply their own -inf by the scale: a scale of 0 gives NaN, and a
    negative one +inf.
    """
    return p.scale > 1e-30 and p.mask.band(p.grid) == (UNLIMITED, 0)


def hides_nothing(p: Problem) -> bool:
    """Does every query see every key, as in a causal step of decoding?"""
    band = p.mask.band(p.grid)
    return band is not None and band[0] >= p.Tq - 1 and band[1] >= p.Tk - 1


def preferred(gpu: Gpu) -> tuple[str, ...]:
    """Return the enabled kernels in the order in which they are tried.

    Measured on an H200 (9.0): cuDNN takes 0.5 to 0.65 of flash's time, and 0.6 to 0.9 of it for a
    step of decoding. The order for 8.x follows from reasons: cuDNN uses the matrix units of 9.0 and
    later as they require, the other two are written for those of 8.0. Efficient moves more bytes.
    """
    order = BACKENDS if gpu.capability >= (9, 0) else LATE_CUDNN
    return tuple(name for name in order if name in gpu.enabled)


def why_not_direct(problem: Problem, gpu: Gpu) -> str:
    """Return why torch's fused kernels cannot be called directly (gpu/fused); empty if they
    can."""
    p = problem
    plain, causal = hides_nothing(p), is_causal(p)
    if p.bias is not None:
        return "torch's kernels need the bias written out"
    if not plain and not causal:
        return "torch's kernels need this mask written out, and q, k and v cleaned of NaN"
    if p.softcap is not None or p.sinks is not None:
        return "torch's kernels have neither soft cap nor sinks"
    if p.dropout:
        return "torch's kernels draw dropout, which the repair of masked NaN cannot repeat"
    if p.D % 8 or p.Dv % 8 or 0 in (p.B, p.H, p.Tq, p.Tk, p.Dv, p.D):
        return "torch's kernels need head sizes that are multiples of 8"
    if not plain and (gpu.capability < (8, 0) or max(p.D, p.Dv) > 256):
        return "the repair of masked NaN needs capability 8.0 and head sizes up to 256"
    declined = backends_decline(p, gpu, False)
    if not all(declined.values()):
        return ""
    return f"none of torch's fused kernels can compute it ({listed(declined)})"


def why_not_torch(problem: Problem, gpu: Gpu) -> str:
    """Return why torch's kernels are not the first choice for a problem; empty if they are."""
    reason = why_not_direct(problem, gpu)
    if not reason or problem.bias is not None or not hides_nothing(problem):
        return reason
    declined = backends_decline(problem, gpu, False)  # by scaled_dot_product_attention
    return reason if all(declined.values()) else ""


def why_slower(p: Problem, gpu: Gpu) -> str:
    """Return why torch's kernels take longer than the Triton kernels; empty if they do not, or if
    their times are unknown.

    On an H200 the Triton kernels took 0.67 of the time for float32 heads of 64 features, and as
    long for 128. Neither gradients nor decoding were timed.
    """
    small = max(p.D, p.Dv) <= 64 and p.Tq > 16 and not p.grad
    if p.dtype != torch.float32 or not small or gpu.capability < (9, 0):
        return ""
    return "for float32 heads of up to 64 features torch's kernels take longer"


def listed(declined: dict[str, list[str]]) -> str:
    """Return the backends and their reasons as text."""
    return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in declined.items())


def backends_decline(problem: Problem, gpu: Gpu, matrix: bool) -> dict[str, list[str]]:
    """Return for each of torch's fused kernels why it cannot compute the problem: an empty list if
    it can. `matrix`: whether the mask or the bias must be written out as a matrix."""
    return {name: _declines(name, problem, gpu, matrix) for name in BACKENDS}


def _declines(name: str, p: Problem, gpu: Gpu, matrix: bool) -> list[str]:
    reasons = []
    if name not in gpu.enabled:
        reasons.append("is disabled by torch.backends.cuda or sdpa_kernel")
    if p.dtype not in (HALF if name != "efficient" else (*HALF, torch.float32)):
        reasons.append(f"does not support {p.dtype_name}")
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
        if p.Tq != p.Tk and not hides_nothing(p):
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
