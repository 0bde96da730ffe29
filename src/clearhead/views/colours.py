"""The one colour map of every view: viridis."""

# Viridis at eleven points (Smith & van der Walt 2015); between them colours are mixed. It is even
# in lightness, and in the same order for every kind of colour vision.
VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140),
    (34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip

Colour = tuple[int, int, int]


def viridis(share: float) -> Colour:
    """Red, green and blue of a number between 0 (dark) and 1 (bright).

    >>> viridis(0), viridis(0.05), viridis(1)
    ((68, 1, 84), (70, 18, 100), (253, 231, 37))
    """
    place = min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1)
    low = min(int(place), len(VIRIDIS) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low))
        for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True)
    )
    return red, green, blue
