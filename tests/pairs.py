"""Combinations of parameters, of which some run each time: any two values meet, not any three."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of one value of each axis, for `parametrize`. Those that a pairwise
    covering leaves out are slow."""
    values = [list(axis) for axis in axes]
    cells = list(product(*(range(len(axis)) for axis in values)))
    chosen = covering(cells)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, cell, strict=True)),
            marks=() if cell in chosen else pytest.mark.slow,
        )
        for cell in cells
    ]


def covering(cells: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Some of the cells of a grid that hold every pair of coordinates. A cell is taken as soon as
    enough of its pairs are new: at first all of them, at last one."""
    chosen, seen = set(), set()
    of_cell = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    for enough in range(max(map(len, of_cell.values()), default=0), 0, -1):
        for cell, its_pairs in of_cell.items():
            if len(its_pairs - seen) >= enough:
                chosen.add(cell)
                seen |= its_pairs
    return chosen
