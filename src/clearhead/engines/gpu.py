"""A GPU described, and which of torch's fused kernels it can use: a function of the problem and the
description alone, so that the choice can be read, planned and tested without a device.

The rules are those that torch documents for `scaled_dot_product_attention` and its backends (2.13);
the device itself is not asked. Where no backend can, torch forms the weights, queries x keys.
"""

from typing import NamedTuple

import torch

from ..problem.problem import Problem

HALF = torch.float16, torch.bfloat16
BACKENDS = "cudnn", "flash", "efficient"  # in the order in which they are named, not of speed


class Gpu(NamedTuple):
    """What the choice depends on."""

    capability: tuple[int, int]  # of CUDA: (8, 0) is an A100, (9, 0) an H100
    cudnn: bool = True


def gpu_of(device: torch.device) -> Gpu:
    """The description of a device that is there."""
    return Gpu(torch.cuda.get_device_capability(device), torch.backends.cudnn.is_available())


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
    if name == "efficient":
        if p.dtype not in (*HALF, torch.float32):
            reasons.append(f"no {kind}")
        if p.G != p.H:
            reasons.append("no grouped heads")
        step = 4 if p.dtype == torch.float32 else 8
        if p.D % step or p.Dv % step:
            reasons.append(f"heads of a multiple of {step}")
        if gpu.capability < ((8, 0) if p.dtype == torch.bfloat16 else (5, 0)):
            reasons.append("a later GPU")
        return reasons
    if p.dtype not in HALF:
        reasons.append(f"no {kind}")
    if gpu.capability < (8, 0):
        reasons.append("a GPU of compute capability 8.0")
    if p.D != p.Dv:
        reasons.append("keys and values of one size")
    most = 256 if name == "flash" else 128
    if p.D > most:
        reasons.append(f"heads of up to {most}")
    if name == "flash" and matrix:
        reasons.append("no mask as a matrix")
    if name == "flash" and p.masked and p.Tq != p.Tk:
        reasons.append("a causal mask only with Tq = Tk")
    if name == "cudnn" and not gpu.cudnn:
        reasons.append("cuDNN")
    if name == "cudnn" and (p.D % 8 or p.dropout):
        reasons.append("no dropout" if p.dropout else "heads of a multiple of 8")
    return reasons
