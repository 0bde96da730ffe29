"""Numbers and counts as text and JSON, and which positions of a long axis are written out."""

import math
from collections.abc import Callable
from typing import Any

from ..results.trace import AXES

PLURAL = {"query": "queries"}


def number(x: float, decimals: int) -> str:
    """A number with so many digits after the point, in exponential form from a million on.

    >>> number(-0.00001, 4), number(float("-inf"), 4), number(2.5e9, 2)
    ('0.0000', '−∞', '2.50e+09')
    """
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    text = f"{x:.{decimals}e}" if abs(x) >= 1e6 else f"{x:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text


def counted(size: int, letter: str) -> str:
    """The size of an axis with its name, by the axis' letter.

    >>> counted(5, "q"), counted(1, "k")
    ('5 queries', '1 key')
    """
    name = AXES.get(letter, letter)
    return f"{size} {name if size == 1 else PLURAL.get(name, name + 's')}"


def ends(size: int, most: int) -> list[int | None]:
    """Positions 0 to size - 1; if these are more than `most`, the first and last, around a None.

    >>> ends(3, 4), ends(9, 4)
    ([0, 1, 2], [0, 1, None, 7, 8])
    """
    if size <= most:
        return list(range(size))
    first = (most + 1) // 2
    return [*range(first), None, *range(size - most + first, size)]


def evenly(size: int, most: int) -> list[int]:
    """At most `most` positions (two or more), evenly spaced, with both ends.

    >>> evenly(3, 4), evenly(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if size <= most:
        return list(range(size))
    return [round(i * (size - 1) / (most - 1)) for i in range(most)]


def without_nan(value: Any, write: Callable[[float], object]) -> Any:
    """Nested dicts and lists for JSON, which has neither NaN nor infinity: each is `write(x)`.

    >>> without_nan({"a": (1.0, float("inf"))}, str)
    {'a': [1.0, 'inf']}
    """
    if isinstance(value, dict):
        return {name: without_nan(x, write) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(x, write) for x in value]
    return write(value) if isinstance(value, float) and not math.isfinite(value) else value
