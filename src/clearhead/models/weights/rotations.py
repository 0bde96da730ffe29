"""Rotations of queries and keys by their positions (rotary positions), as data."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...nn import RotaryPositions


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
        cos, sin = angles.cos(), angles.sin()
        if self.interleaved:
            a, b = x[..., :r].unflatten(-1, (-1, 2)).unbind(-1)
            first = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = x[..., :r].chunk(2, -1)
            first = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([first, x[..., r:]], -1)


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
