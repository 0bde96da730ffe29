"""Read the norms of a model as linear maps with a known scale, and its rotary positions as data."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...nn import RotaryPositions
from ...nn.embed import rotate_pairs


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


class Rotary(NamedTuple):
    """A rotation of pairs of features by their position times a frequency.

    r/2 frequencies rotate the first r features. The pairs are i and i + r/2, or 2i and 2i + 1 if
    `interleaved`.
    """

    frequencies: Tensor
    interleaved: bool

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x, (..., D), at `positions`, which broadcast to x without its last dimension."""
        r = 2 * len(self.frequencies)
        angles = positions.unsqueeze(-1) * self.frequencies.to(x)
        return torch.cat([rotate_pairs(x[..., :r], angles, self.interleaved), x[..., r:]], -1)


def rotations_of(model: nn.Module) -> list[Rotary]:
    """Return the rotations that the modules of a model may apply."""
    frequencies: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, RotaryPositions):
            half = torch.arange(0, module.head_size, 2, dtype=torch.float64)
            frequencies.append(module.base ** (-half / module.head_size))
        frequencies += [x for n, x in module.named_buffers(recurse=False) if n.endswith("inv_freq")]
    distinct: list[Tensor] = []
    for x in frequencies:
        x = x.detach().double()
        if not any(x.shape == y.shape and torch.allclose(x, y, rtol=1e-6) for y in distinct):
            distinct.append(x)
    # NanoChat rotates in the other direction.
    return [Rotary(y, paired) for x in distinct for y in (x, -x) for paired in (False, True)]


def growing_rotations(model: nn.Module) -> tuple[str, ...]:
    """Describe the rotations whose frequencies depend on the length of the text."""
    growing = []
    for name, module in model.named_modules():
        types = getattr(module, "rope_type", None)  # one, or one for each kind of layer
        rope_types = dict.fromkeys(types.values() if isinstance(types, Mapping) else [types])
        growing += [
            f"the rotation {name} is {kind!r}, with other frequencies in long texts"
            for kind in rope_types
            if kind in ("dynamic", "longrope")
        ]
    return tuple(growing)
