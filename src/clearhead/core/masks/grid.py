"""Check the sizes with which a mask is used."""

from typing import NamedTuple, Protocol

from ..errors import BadType, BadValue, whole_number


class Grid(NamedTuple):
    """The numbers of queries, keys, batches and heads."""

    Tq: int
    Tk: int
    B: int = 1
    H: int = 1


class Sized(Protocol):
    """A mask that may fix some sizes, and that checks the others."""

    def sizes(self) -> dict[str, int]: ...

    def check(self, grid: Grid) -> None: ...

    def must_fit(self, grid: Grid) -> None: ...


def make_grid(
    mask: Sized, Tq: int | None, Tk: int | None, B: int | None = None, H: int | None = None, *,
    default: int | None = None, at_least: tuple[int, int, int] = (0, 1, 1),
) -> Grid:  # fmt: skip
    """Return checked sizes, and fill in those that are None.

    A size that is None is the one that the mask fixes. Otherwise Tq = Tk, and both are `default` if
    neither is known. Tq, B and H that are not fixed are at least `at_least`.
    """
    known = mask.sizes()
    Tq = known.get("Tq") if Tq is None else Tq
    Tk = known.get("Tk", Tq) if Tk is None else Tk
    Tk = default if Tk is None else Tk
    if Tq is None and Tk is not None:
        Tq = max(check_int("Tk", Tk), at_least[0])
    if Tq is None or Tk is None:
        rule = "a rule over positions does not fix the numbers of queries and keys."
        hint = "pass them, for example mask.to_bool(5) or mask.to_bool(3, 10)."
        raise BadValue(f"The sizes of {mask!r} are unknown.", rule, hint)
    B = known.get("B", at_least[1]) if B is None else B
    H = known.get("H", at_least[2]) if H is None else H
    sizes = (("Tq", Tq), ("Tk", Tk), ("B", B), ("H", H))
    grid = Grid(*(check_int(name, size) for name, size in sizes))
    if min(grid) < 0:
        hint = "pass the numbers of queries, keys, batches and heads."
        raise BadValue(f"{mask!r} got {grid}.", "sizes are 0 or more.", hint)
    mask.check(grid)
    if default is None:
        mask.must_fit(grid)
    return grid


def check_int(name: str, value: object) -> int:
    number = whole_number(value)
    if number is None:
        rule = "positions and sizes are whole numbers."
        raise BadType(f"A mask got {name}={value!r}.", rule, "pass an int.")
    return number
