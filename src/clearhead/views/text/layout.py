"""The paper the terminal views write on: how wide it is, and how a matrix is laid out on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from ...errors import BadType, BadValue, kind_of, whole_number
from ...results.trace import Trace
from ..panels import VIRIDIS, Sheet, ends

ENDLESS = 1_000_000  # columns; a pipe has no edge, so nothing is wrapped or cut there
INDENT = 3

GAP = "…"

Cell = tuple[str, str | Style]
EMPTY: Cell = ("", "")


MOST_DECIMALS = 12


def checked(trace: object, decimals: int) -> None:
    """Raises `BadType` for what is no trace and `BadValue` for digits that cannot be shown, before
    anything is printed."""
    if not isinstance(trace, Trace):
        raise BadType(
            f"A view was given {kind_of(trace)}.",
            "views show the steps of a Trace.",
            "pass what explain(...) returns.",
        )
    digits = whole_number(decimals)
    if digits is None or not 0 <= digits <= MOST_DECIMALS:
        raise BadValue(
            f"decimals={decimals!r}.",
            f"decimals are the digits after the point, from 0 to {MOST_DECIMALS}.",
            "pass for example decimals=4.",
        )


def at_least_one(name: str, value: object) -> int:
    """`value`, if it is a whole number from 1 on."""
    number = whole_number(value)
    if number is None or number < 1:
        raise BadValue(
            f"{name}={value!r}.",
            f"{name} is how many rows and columns are written out, 1 or more.",
            f"pass for example {name}=12.",
        )
    return number


def first_of_many(out: Console, trace: Trace) -> None:
    """Which sequence of a batch is shown, where there are several."""
    if (count := trace.size("b") or 1) > 1:
        out.print(Text(f"A batch of {count}: the first is shown; trace.sequence(1) is the second."))


@contextmanager
def paper(console: Console | None) -> Iterator[Console]:
    """The console to write on. One that is no terminal is endlessly wide meanwhile."""
    console = console or Console()
    if console.is_terminal:
        yield console
        return
    width = console.width
    console.width = ENDLESS
    try:
        yield console
    finally:
        console.width = width


def coloured(console: Console) -> bool:
    """Whether colour can carry meaning here; where it cannot, characters must."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def shade(share: float) -> Style:
    """The colour of a share between 0 and 1, dark to bright, with ink that can be read on it."""
    place = min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1)
    low = min(int(place), len(VIRIDIS) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low))
        for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True)
    )
    ink = "rgb(0,0,0)" if share > 0.55 else "rgb(255,255,255)"
    return Style.parse(f"{ink} on rgb({red},{green},{blue})")


def indented(what: RenderableType) -> Padding:
    """What belongs to a step stands a little to the right of its name."""
    return Padding(what, (0, 0, 0, INDENT), expand=False)


def matrix(
    out: Console, sheet: Sheet, cell: Callable[[int, int], Cell], most: int, sums: bool = False
) -> Text:
    """`sheet` as a table whose numbers come from `cell(row, column)`, elided to `most` each way.

    In a terminal it is elided further until it fits. `sums` adds a column: `cell(row, -1)`.
    """
    height, width = sheet.values.shape
    rows = ends(height, most)
    above = [EMPTY] * (1 if sheet.columns is None else 2)
    left: list[list[Cell]] = [
        [*above, *[(GAP if i is None else str(sheet.first[0] + i), "dim") for i in rows]]
    ]
    if sheet.rows is not None:
        left.append([*above, *[EMPTY if i is None else (sheet.rows[i], "") for i in rows]])
    columns = {j: _column(sheet, j, rows, cell) for j in [None, *ends(width, most)]}
    right: list[list[Cell]] = []
    if sums:
        names: list[Cell] = [("row", "dim"), ("sum", "dim")]
        right = [[*names[-len(above) :], *[(GAP, "") if i is None else cell(i, -1) for i in rows]]]
    for count in range(min(most, width), 0, -1):
        page = [*left, *[columns[j] for j in ends(width, count)], *right]
        if INDENT + sum(map(_width, page)) + len(page) - 1 <= out.width:
            break
    return _laid_out(page, len(left))


def _column(
    sheet: Sheet, j: int | None, rows: list[int | None], cell: Callable[[int, int], Cell]
) -> list[Cell]:
    above: list[Cell] = [(GAP if j is None else str(sheet.first[1] + j), "dim")]
    if sheet.columns is not None:
        above.append(EMPTY if j is None else (sheet.columns[j], "bold"))
    return above + [(GAP, "") if i is None or j is None else cell(i, j) for i in rows]


def _width(column: list[Cell]) -> int:
    return max(cell_len(text) for text, _ in column)


def _laid_out(columns: list[list[Cell]], labels: int) -> Text:
    """Columns beside one another; tokens, the second of two labels, stand left, numbers right."""
    # rich's own tables take a tenth of a millisecond for each cell, and pad the ends of lines.
    widths = [_width(column) for column in columns]
    page = Text(no_wrap=True, overflow="ellipsis")
    for at, row in enumerate(zip(*columns, strict=True)):
        line = Text("\n" * (at > 0))
        for k, ((text, style), width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(text))
            line.append(" " * (k > 0))
            line.append(text + space if 0 < k < labels else space + text, style)
        line.rstrip()
        page.append(line)
    return page
