"""Colours of numbers in figures, which are those of the page.

The scale of weights is their square root, from 0 to 1; signed numbers have a scale around 0.
Weights of a part of a larger matrix may all be small, so they have the range of a terminal.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..colours import DIVERGING, SEQUENTIAL
from ..panels import Panel, map_range, value_range

if TYPE_CHECKING:
    from matplotlib.colors import Colormap, Normalize

WEIGHT_TICKS = 0, 0.1, 0.5, 1  # of the colour bar of weights, as fractions of its range


def weight_ink(low: float = 0.0, high: float = 1.0) -> "tuple[Colormap, Normalize]":
    """Return colours and scale of weights, the same for any number of tokens."""
    from matplotlib.colors import PowerNorm

    return _colours(SEQUENTIAL["light"]), PowerNorm(0.5, vmin=low, vmax=high or 1.0, clip=True)


def signed_ink(limit: float) -> "tuple[Colormap, Normalize]":
    """Return colours and scale of numbers from -limit to limit."""
    from matplotlib.colors import Normalize

    return _colours(DIVERGING["light"]), Normalize(-limit, limit)


def ink_of(drawn: Sequence[Panel]) -> "tuple[Colormap, Normalize]":
    """Return common colours and scale for panels of one step."""
    if not drawn[0].is_share:
        return signed_ink(_largest(drawn))
    return weight_ink(*map_range(drawn)) if drawn[0].is_part else weight_ink()


def _largest(drawn: Sequence[Panel]) -> float:
    """Return the largest absolute value in some panels; 1 if all are 0."""
    return max(map(abs, value_range(drawn))) or 1.0


def _colours(points: Sequence[tuple[int, int, int]]) -> "Colormap":
    from matplotlib.colors import LinearSegmentedColormap

    colours = [[channel / 255 for channel in point] for point in points]
    return LinearSegmentedColormap.from_list("clearhead", colours).with_extremes(bad="0.92")
