"""The sizes that a mask is asked about."""

from typing import NamedTuple


class Grid(NamedTuple):
    """How many queries and keys a mask is asked about, in how many batches and heads."""

    Tq: int
    Tk: int
    B: int = 1
    H: int = 1
