"""The colour scales of all views."""

from collections.abc import Sequence

Colour = tuple[int, int, int]

# For a terminal, dark or bright: viridis at eleven points (Smith & van der Walt 2015), with colours
# mixed between them. Its lightness is even, and its order is the same for all colour vision.
VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140),
    (34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip

# For pages and figures. Weights: from the colour of the paper to the deepest ink, even in
# lightness. Signed numbers: negative, zero, positive.
SEQUENTIAL: dict[str, tuple[Colour, ...]] = {
    "light": (
        (252, 251, 248), (226, 238, 232), (183, 219, 214), (130, 193, 197), (78, 160, 178),
        (39, 124, 154), (20, 90, 125), (16, 58, 92), (14, 32, 58),
    ),
    "dark": (
        (20, 22, 25), (22, 44, 58), (20, 70, 92), (28, 100, 125), (52, 135, 155), (98, 171, 178),
        (155, 204, 196), (212, 232, 214), (252, 251, 232),
    ),
}  # fmt: skip
DIVERGING: dict[str, tuple[Colour, ...]] = {
    "light": (
        (122, 42, 16), (184, 92, 52), (226, 162, 130), (252, 251, 248), (150, 198, 208),
        (52, 128, 156), (10, 72, 102),
    ),
    "dark": (
        (255, 196, 164), (232, 136, 92), (140, 68, 38), (20, 22, 25), (28, 84, 108),
        (86, 170, 196), (190, 232, 244),
    ),
}  # fmt: skip


def viridis(fraction: float) -> Colour:
    """Return red, green and blue of a number between 0 (dark) and 1 (bright), for a terminal.

    >>> viridis(0), viridis(0.05), viridis(1)
    ((68, 1, 84), (70, 18, 100), (253, 231, 37))
    """
    return _mixed(VIRIDIS, fraction)


def ink(fraction: float) -> Colour:
    """Return the colour of a weight on the page; `fraction` is the square root of the weight.

    >>> ink(0), ink(1)
    ((252, 251, 248), (14, 32, 58))
    """
    return _mixed(SEQUENTIAL["light"], fraction)


def _mixed(points: Sequence[Colour], fraction: float) -> Colour:
    position = min(max(fraction, 0.0), 1.0) * (len(points) - 1)
    low = min(int(position), len(points) - 2)
    red, green, blue = (
        round(a + (b - a) * (position - low))
        for a, b in zip(points[low], points[low + 1], strict=True)
    )
    return red, green, blue
