"""Print every step of a trace: its name, formula, shape, reason and numbers.

The other views share the layout: the width of a line, colours, and a matrix as columns.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text
from torch import Tensor

from ...core.errors import as_count, must_be
from ...core.formatting import axis_size, ends, number, visible
from ...core.functional.trace import Step, Trace
from ..colours import viridis
from ..panels import Panel, choose_heads, panels, value_range

LETTERS = {
    "B": "sequences", "H": "heads", "G": "key heads", "Tq": "queries", "Tk": "keys",
    "D": "features of a head", "Dv": "features of a value",
}  # fmt: skip


def show(
    trace: Trace,
    *,
    console: Console | None = None,
    heads: Sequence[int] | None = None,
    decimals: int = 4,
    most: int = 12,
) -> None:
    """Print each step: its number, name and formula, its shape, its reason, its numbers.

    Rows and columns beyond `most` are elided in the middle; in a terminal, columns beyond its width
    too. Without a terminal the text is plain and never cut. ``console=None`` writes to standard
    output, and ``heads=None`` shows all heads. Raises `BadValue` for a head that does not exist.
    """
    check_trace(trace, decimals)
    most = at_least_one("most", most)
    choose_heads(trace, heads)
    with unwrapped(console) as out:
        if trace.about:
            out.print(Text(visible(trace.about, 10_000)))
            if letters := _letters(trace.about):
                out.print(Text(letters, style="dim"))
        print_batch_note(out, trace)
        for ordinal, step in enumerate(trace, 1):
            drawn = panels(trace, step, heads)
            out.print()
            out.print(heading(ordinal, step))
            out.print(indented(Text(shape(step))))
            if step.why:
                out.print(indented(Text(step.why, style="italic")))
            if step.name == "masked":
                _ticks(out, drawn, most)
            for panel in drawn:
                out.print()
                if panel.title:
                    out.print(indented(Text(panel.title, style="bold")))
                out.print(indented(_numbers(out, step, panel, decimals, most)))


def _letters(about: str) -> str:
    """Return the meanings of the letters of a line like ``B=1 H=2 Tq=6``."""
    meanings = (f"{letter} {LETTERS[letter]}" for letter in re.findall(r"\b(\w+)=", about)
                if letter in LETTERS)  # fmt: skip
    return ", ".join(meanings)


def heading(ordinal: int | None, step: Step) -> Text:
    """Return a heading such as ``4. scores = Q Kᵀ``, without a number if there is only one step."""
    formula = f" = {step.formula}" if step.formula else ""
    name = step.name if ordinal is None else f"{ordinal}. {step.name}"
    return Text.assemble((name, "bold"), formula)


def shape(step: Step) -> str:
    """Return a shape such as ``2 heads × 5 queries × 5 keys``."""
    return " × ".join(
        axis_size(size, step.axis_name(letter))
        for letter, size in zip(step.axes.split(), step.shape, strict=True)
    )


def _numbers(out: Console, step: Step, panel: Panel, decimals: int, most: int) -> Text:
    digits = decimals if step.tensor.is_floating_point() else 0
    are_weights = step.name in ("weights", "dropped")
    shaded = coloured(out) and are_weights
    largest = max(value_range([panel])[1], 1e-30)
    values, blocked, sums = panel.values.numpy(), panel.blocked.numpy(), panel.values.sum(1).numpy()

    def cell(i: int, j: int) -> Cell:
        text = " " + number(sums[i] if j < 0 else values[i, j], digits)
        if j < 0 or not (shaded or blocked[i, j]):
            return text, ""
        return text, "dim" if blocked[i, j] else shade(values[i, j] / largest)

    return matrix(out, panel, cell, most, sums=are_weights)


def _ticks(out: Console, drawn: list[Panel], most: int) -> None:
    """Print the mask as ticks and crosses, only once if all heads have the same mask."""
    same = all(torch.equal(panel.blocked, drawn[0].blocked) for panel in drawn)
    for panel in drawn[:1] if same else drawn:
        whose = "every head" if same and len(drawn) > 1 else panel.title
        title = f"{whose}: ".lstrip(": ") + "✓ may look, ✗ may not"
        width = len(str(panel.values.shape[1] - 1))

        def cell(i: int, j: int, blocked: Tensor = panel.blocked, width: int = width) -> Cell:
            mark, style = ("✗", "red") if blocked[i, j] else ("✓", "green")
            return mark.rjust(width), style

        out.print()
        out.print(indented(Text(title)))
        out.print(indented(matrix(out, replace(panel, columns=None), cell, 2 * most)))


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
    must_be("A view", trace, Trace, "explain(...)")
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
