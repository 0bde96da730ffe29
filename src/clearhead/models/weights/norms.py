"""Read the norms of a model as linear maps with a known scale."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Norm(NamedTuple):
    """A norm ``(x - mean) * scale * gain``, or ``x * scale * gain`` if it does not centre.

    The scale is ``1 / sqrt(mean square + eps)``, and the gain is the weight or 1 + weight. A bias
    is not included.
    """

    centres: bool
    eps: float
    gain: Tensor | float

    def frozen(self, x: Tensor) -> Tensor:
        """Compute the norm without its bias, in fp32 or wider; the scale has no gradient."""
        wide = x.to(wide_dtype(x))
        if self.centres:
            wide = wide - wide.mean(-1, keepdim=True)
        square = wide.detach().square().mean(-1, keepdim=True)
        return wide * torch.rsqrt(square + self.eps) * self.gain


def is_norm(module: nn.Module) -> bool:
    """Is it a norm by its name? `read_norm` checks what it computes."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


@torch.no_grad()
def read_norm(module: nn.Module, x: Tensor, y: Tensor) -> Norm | None:
    """Return the norm that a module computes, from its output `y` for `x`; None if unknown."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    sizes = [p.shape for p in (weight, bias) if isinstance(p, Tensor)]
    if x.shape != y.shape or any(size != x.shape[-len(size) :] for size in sizes):
        return None
    by_head = isinstance(weight, Tensor) and weight.dim() > 1
    some = x if by_head else x.reshape(-1, x.shape[-1])[:4]
    # A norm that centres has the same output for a shifted vector.
    shifted = module.forward(some + some.abs().amax(-1, keepdim=True))
    centres = _close(shifted, module.forward(some), 0.2)
    epsilons = [getattr(module, n, None) for n in ("eps", "variance_epsilon", "epsilon")]
    gains: list[Tensor | float] = [1.0]
    if isinstance(weight, Tensor):
        wide = weight.detach().to(wide_dtype(x))
        gains = [wide, 1 + wide]
    for eps in [e for e in epsilons if isinstance(e, float)] or [1e-5, 1e-6]:
        for gain in gains:
            norm = Norm(centres, eps, gain)
            expected = norm.frozen(x) + (bias if isinstance(bias, Tensor) else 0.0)
            if _close(expected, y, max(1e-5, 4 * torch.finfo(y.dtype).eps)):
                return norm
    return None


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.double(), b.double()
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
