"""The norms of a model as linear maps: what they do once their scale is known."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Norm(NamedTuple):
    """``(x - mean) * scale * gain``, or ``x * scale * gain`` if it does not centre. The scale is
    ``1 / sqrt(mean square + eps)``, the gain the weight or 1 + weight; a bias comes after it."""

    centres: bool
    eps: float
    gain: Tensor | float

    def frozen(self, x: Tensor) -> Tensor:
        """What it gives without its bias, in fp32 or wider; autograd sees a constant scale."""
        wide = x.double() if x.dtype == torch.float64 else x.float()
        if self.centres:
            wide = wide - wide.mean(-1, keepdim=True)
        square = wide.detach().square().mean(-1, keepdim=True)
        return wide * torch.rsqrt(square + self.eps) * self.gain


def is_norm(module: nn.Module) -> bool:
    """Is it a norm? By its name; whether it computes one, `read_norm` finds out."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@torch.no_grad()
def read_norm(module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """What a module, which gave `y` for `x`, computes; None if that is not a norm."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    sizes = [p.shape for p in (weight, bias) if isinstance(p, Tensor)]
    if x.shape != y.shape or any(size != x.shape[-len(size) :] for size in sizes):
        return None
    by_head = isinstance(weight, Tensor) and weight.dim() > 1
    some = x if by_head else x.reshape(-1, x.shape[-1])[:4]
    # One that centres gives the same for a shifted vector.
    moved = module.forward(some + some.abs().amax(-1, keepdim=True))
    centres = _close(moved, module.forward(some), 0.2)
    epsilons = [getattr(module, n, None) for n in ("eps", "variance_epsilon", "epsilon")]
    gains: list[Tensor | float] = [1.0]
    if isinstance(weight, Tensor):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        gains = [weight.detach().to(wide), 1 + weight.detach().to(wide)]
    for eps in [e for e in epsilons if isinstance(e, float)] or [1e-5, 1e-6]:
        for gain in gains:
            norm = Norm(centres, eps, gain)
            given = norm.frozen(x) + (bias if isinstance(bias, Tensor) else 0.0)
            if _close(given, y, max(1e-5, 4 * torch.finfo(y.dtype).eps)):
                return norm
    return None


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.double(), b.double()
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
