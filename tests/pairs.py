"""Grids of parameters in which any two values meet, though not any three."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, Any, Any]]:
    """Every value of the first axis with every one of the second; those of the third take turns."""
    first, second, third = (list(axis) for axis in axes)
    found = [(i, j, (i + j) % len(third)) for i in range(len(first)) for j in range(len(second))]
    for (m, a), (n, b) in combinations(enumerate((first, second, third)), 2):
        assert len({(x[m], x[n]) for x in found}) == len(a) * len(b)
    return [(first[i], second[j], third[k]) for i, j, k in found]
