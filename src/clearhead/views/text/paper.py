"""The paper the terminal views write on: how wide it is, and how a matrix is laid out on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..sheet import Sheet, ends

ENDLESS = 1_000_000  # columns; a pipe has no edge, so nothing is wrapped or cut there
INDENT = 3
VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))

Cell = Callable[[int, int], RenderableType]


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


def tint(text: str, share: float) -> RenderableType:
    """A cell whose whole ground is coloured by its share."""
    return Padding(Text(text), 0, style=shade(share))


def indented(what: RenderableType) -> Padding:
    """What belongs to a step stands a little to the right of its name."""
    return Padding(what, (0, 0, 0, INDENT), expand=False)


def matrix(
    console: Console, sheet: Sheet, cell: Cell, most: int, *, sums: list[Text] | None = None
) -> Table:
    """`sheet` as a table whose numbers come from `cell(row, column)`, elided to `most` each way.

    In a terminal it is elided further until it fits. `sums` is one more column, beside the rows.
    """
    rows = ends(len(sheet.values), most)
    for columns in range(min(most, sheet.values.shape[1]), 0, -1):
        table = _table(sheet, cell, rows, ends(sheet.values.shape[1], columns), sums)
        wide = Measurement.get(console, console.options.update(max_width=ENDLESS), table).maximum
        if wide + INDENT <= console.width:
            break
    return table


def gutter(table: Table, tokens: bool) -> None:
    """The columns every table begins with: the position, and the token where there is one."""
    table.add_column(justify="right", style="dim", no_wrap=True)
    if tokens:
        table.add_column(no_wrap=True)


def _table(
    sheet: Sheet,
    cell: Cell,
    rows: list[int | None],
    columns: list[int | None],
    sums: list[Text] | None,
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    gutter(table, sheet.rows is not None)
    for j in columns:
        table.add_column(_heading(sheet, j), justify="right", no_wrap=True)
    if sums is not None:
        name = "row\nsum" if sheet.columns is not None else "sum"
        table.add_column(Text(name), justify="right", no_wrap=True)
    for i in rows:
        label: list[RenderableType] = [Text("…" if i is None else str(i))]
        if sheet.rows is not None:
            label.append(Text("" if i is None else sheet.rows[i]))
        cells = [Text("…") if i is None or j is None else cell(i, j) for j in columns]
        last = [] if sums is None else [Text("…") if i is None else sums[i]]
        table.add_row(*label, *cells, *last)
    return table


def _heading(sheet: Sheet, j: int | None) -> Text:
    position = Text("…" if j is None else str(j), style="dim")
    if sheet.columns is None:
        return position
    return Text.assemble(position, "\n", ("" if j is None else sheet.columns[j], "bold"))
