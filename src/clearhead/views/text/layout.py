"""Lay out terminal views: the width of a line, colours, and a matrix as columns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from ...core.errors import BadType, as_count, kind_of
from ...core.formatting import ends
from ...core.functional.trace import Trace
from ..colours import viridis
from ..panels import Panel

UNLIMITED = 1_000_000  # columns without a terminal, where nothing is wrapped or cut
INDENT = 3
GAP = "…"
MOST_DECIMALS = 12

Cell = tuple[str, str | Style]  # its text and its style
EMPTY: Cell = ("", "")


def check_trace(trace: object, decimals: int) -> None:
    """Raise `BadType` for anything but a trace, and `BadValue` for an invalid number of decimals.

    Called before anything is printed.
    """
    if not isinstance(trace, Trace):
        raise BadType(
            f"A view got {kind_of(trace)}.",
            "views show the steps of a Trace.",
            "pass the result of explain(...).",
        )
    rule = f"decimals are the digits after the point, from 0 to {MOST_DECIMALS}."
    as_count("decimals", decimals, rule, "pass for example decimals=4.", most=MOST_DECIMALS)


def at_least_one(name: str, value: object) -> int:
    """Return `value` if it is a whole number from 1 on; raise `BadValue` otherwise."""
    rule = f"{name} is the number of printed rows and columns, 1 or more."
    return as_count(name, value, rule, f"pass for example {name}=12.", least=1)


def print_batch_note(out: Console, trace: Trace) -> None:
    """Print which sequence of a batch is shown, if there are several."""
    if (count := trace.size("b") or 1) > 1:
        out.print(Text(f"A batch of {count}: the first is shown; trace.sequence(1) is the second."))


@contextmanager
def unwrapped(console: Console | None) -> Iterator[Console]:
    """Yield the console to write to; None means standard output.

    Unless it is a terminal, it wraps no lines inside the `with` block.
    """
    console = console or Console()
    if console.is_terminal:
        yield console
        return
    width = console.width
    console.width = UNLIMITED
    try:
        yield console
    finally:
        console.width = width


def coloured(console: Console) -> bool:
    """Return whether the console shows colours; if not, characters are used instead."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def shade(fraction: float) -> Style:
    """Return the background of a number between 0 (dark) and 1 (bright), with readable text."""
    red, green, blue = viridis(fraction)
    text = "rgb(0,0,0)" if fraction > 0.55 else "rgb(255,255,255)"
    return Style.parse(f"{text} on rgb({red},{green},{blue})")


def indented(what: RenderableType) -> Padding:
    """Indent the content of a step below its name."""
    return Padding(what, (0, 0, 0, INDENT), expand=False)


def matrix(
    out: Console, panel: Panel, cell: Callable[[int, int], Cell], most: int, sums: bool = False
) -> Text:
    """Return a table of a panel with cells `cell(row, column)`, elided to `most` rows and columns.

    In a terminal it is elided further until it fits. `sums` adds a column: `cell(row, -1)`.
    """
    height, width = panel.values.shape
    rows = ends(height, most)
    above = [EMPTY] * (1 if panel.columns is None else 2)
    left: list[list[Cell]] = [
        [*above, *[(GAP if i is None else str(panel.first[0] + i), "dim") for i in rows]]
    ]
    if panel.rows is not None:
        left.append([*above, *[EMPTY if i is None else (panel.rows[i], "") for i in rows]])
    columns = {j: _column(panel, j, rows, cell) for j in [None, *ends(width, most)]}
    right: list[list[Cell]] = []
    if sums:
        names: list[Cell] = [("row", "dim"), ("sum", "dim")]
        right = [[*names[-len(above) :], *[(GAP, "") if i is None else cell(i, -1) for i in rows]]]
    for count in range(min(most, width), 0, -1):
        parts = [*left, *[columns[j] for j in ends(width, count)], *right]
        if INDENT + sum(map(_width, parts)) + len(parts) - 1 <= out.width:
            break
    return _join_columns(parts, len(left))


def _column(
    panel: Panel, j: int | None, rows: list[int | None], cell: Callable[[int, int], Cell]
) -> list[Cell]:
    above: list[Cell] = [(GAP if j is None else str(panel.first[1] + j), "dim")]
    if panel.columns is not None:
        above.append(EMPTY if j is None else (panel.columns[j], "bold"))
    return above + [(GAP, "") if i is None or j is None else cell(i, j) for i in rows]


def _width(column: list[Cell]) -> int:
    return max(cell_len(text) for text, _ in column)


def _join_columns(columns: list[list[Cell]], labels: int) -> Text:
    """Join columns side by side.

    The first `labels` columns name the rows: a number, aligned right, and perhaps a token, aligned
    left.
    """
    # rich's tables take a tenth of a millisecond per cell, and pad the ends of lines.
    widths = [_width(column) for column in columns]
    table = Text(no_wrap=True, overflow="ellipsis")
    for i, row in enumerate(zip(*columns, strict=True)):
        line = Text("\n" * (i > 0))
        for k, ((text, style), width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(text))
            line.append(" " * (k > 0))
            line.append(text + space if 0 < k < labels else space + text, style)
        line.rstrip()
        table.append(line)
    return table
