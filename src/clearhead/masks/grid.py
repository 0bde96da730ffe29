"""The sizes that a mask is used with."""

from typing import NamedTuple, Protocol

from ..errors import BadType, BadValue, whole_number


class Grid(NamedTuple):
    """How many queries and keys there are, in how many batches and heads."""

    Tq: int
    Tk: int
    B: int = 1
    H: int = 1


class Sized(Protocol):
    """What knows some of its sizes, and which sizes it can be used with."""

    def sizes(self) -> dict[str, int]: ...

    def check(self, grid: Grid) -> None: ...

    def must_fit(self, grid: Grid) -> None: ...


def make_grid(
    mask: Sized,
    Tq: int | None,
    Tk: int | None,
    B: int | None = None,
    H: int | None = None,
    *,
    default: int | None = None,
    at_least: tuple[int, int, int] = (0, 1, 1),
) -> Grid:
    """The sizes given, checked. A size that is None is the one that the mask itself fixes; else Tq
    and Tk are each other, or `default` where neither is known. What nothing fixes of Tq, B and H
    is `at_least` so large."""
    known = mask.sizes()
    Tq = known.get("Tq") if Tq is None else Tq
    Tk = known.get("Tk", Tq) if Tk is None else Tk
    Tk = default if Tk is None else Tk
    if Tq is None and Tk is not None:
        Tq = max(check_int("Tk", Tk), at_least[0])
    if Tq is None or Tk is None:
        raise BadValue(
            f"{mask!r} does not know how many queries and keys there are.",
            "a rule over positions has no size of its own.",
            "pass them, for example mask.to_bool(5) or mask.to_bool(3, 10).",
        )
    B = known.get("B", at_least[1]) if B is None else B
    H = known.get("H", at_least[2]) if H is None else H
    sizes = (("Tq", Tq), ("Tk", Tk), ("B", B), ("H", H))
    grid = Grid(*(check_int(name, size) for name, size in sizes))
    if min(grid) < 0:
        raise BadValue(
            f"{mask!r} was asked about {grid}.",
            "sizes are 0 or more.",
            "pass how many queries, keys, batches and heads there are.",
        )
    mask.check(grid)
    if default is None:
        mask.must_fit(grid)
    return grid


def check_int(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None:
        raise BadType(
            f"A mask was asked with {name}={value!r}.",
            "positions and sizes are whole numbers.",
            "pass an int.",
        )
    return number
