"""The heat maps of every head, small, side by side, in the terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from ...results.trace import Trace
from ..panels import Sheet, counted, ends, number, sheets, span
from .layout import checked, coloured, first_of_many, paper, shade
from .show import heading

INK = " ░▒▓█"
PAGE = 100  # characters across where no terminal says how many: what a page takes
TALLEST = 50  # rows of a map that one still sees at once
BETWEEN = "   "
EMPTY = "rgb(58,58,58)"  # a blocked half of a character, which has no room for a mark


@dataclass(frozen=True)
class Layout:
    """How the maps lie on the page: how much is pooled, what is written beside and above them.

    `across` characters make one cell; with `halves`, one character holds two rows. `first` is the
    number of the first column.
    """

    pool: tuple[int, int]
    across: int
    halves: bool
    labels: list[str]
    columns: int
    first: int = 0

    @property
    def margin(self) -> int:
        return max(map(cell_len, self.labels), default=0) + 1


def heat(
    trace: Trace,
    step: str = "weights",
    *,
    console: Console | None = None,
    heads: Sequence[int] | None = None,
) -> None:
    """Print a map of each head: dark to bright in a terminal with colours, ░ to █ elsewhere.

    All maps share one range, so that heads can be compared: from 0, or from the smallest number
    where that is more than half of the largest. A map too large for the page is pooled
    by its maximum, and the text says so. Raises `BadValue` for a step or a head that is not there.
    """
    checked(trace, 0)
    found = sheets(trace, trace.step(step), heads)
    with paper(console) as out:
        out.print(heading(None, trace.step(step)))
        first_of_many(out, trace)
        if not found:
            out.print(Text("There are no numbers in it."))
            return
        tinted = coloured(out)
        page = out.width if out.is_terminal else PAGE
        layout = _layout(found[0], page, tinted)
        low, high = _range(found)
        width = max(layout.columns * layout.across, *(len(sheet.title) for sheet in found))
        abreast = max(1, (page - layout.margin + len(BETWEEN)) // (width + len(BETWEEN)))
        for first in range(0, len(found), abreast):
            some = found[first : first + abreast]
            out.print()
            if any(sheet.title for sheet in some):
                titles = [Text(sheet.title, style="bold") for sheet in some]
                out.print(_beside(Text(), titles, layout.margin, width))
            ruler = Text(_ruler(layout), style="dim")
            out.print(_beside(Text(), [ruler] * len(some), layout.margin, width))
            maps = [_map(sheet, layout, low, high, tinted) for sheet in some]
            for label, *lines in zip(layout.labels, *maps, strict=True):
                out.print(_beside(Text(label), lines, layout.margin, width))
        out.print()
        for note in _notes(found, layout, low, high, tinted):
            out.print(note)


def _range(found: list[Sheet]) -> tuple[float, float]:
    """From 0 to the largest, unless numbers lie so close together that all would look alike."""
    low, high = span(found)
    seen = torch.cat([sheet.values[~sheet.blocked] for sheet in found])
    least = float(seen.min()) if seen.numel() else 0.0
    return (least, high) if high / 2 < least < high else (low, high)


def _layout(sheet: Sheet, page: int, tinted: bool) -> Layout:
    rows, columns = sheet.values.shape
    digits = len(str(sheet.first[0] + rows - 1))
    labels = [
        f"{sheet.first[0] + i:>{digits}} {sheet.rows[i] if sheet.rows else ''}".rstrip()
        for i in range(rows)
    ]
    small = Layout((1, 1), 2, False, labels, columns, sheet.first[1])
    if rows <= TALLEST and small.margin + 2 * columns <= page:
        return small
    across, height = (1, 2) if tinted else (2, 1)
    widest = max(1, (page - digits - 1) // across)
    pool = (-(-rows // (TALLEST * height)), -(-columns // widest))
    if rows == columns:  # so that the diagonal stays one
        pool = (max(pool), max(pool))
    labels = [f"{sheet.first[0] + i:>{digits}}" for i in range(0, rows, pool[0] * height)]
    return Layout(pool, across, tinted, labels, -(-columns // pool[1]), sheet.first[1])


def _map(sheet: Sheet, layout: Layout, low: float, high: float, tinted: bool) -> list[Text]:
    values = _pooled(sheet.values.masked_fill(sheet.blocked, -math.inf), layout.pool)
    span = (high - low) or 1.0
    shares = [[(x - low) / span for x in row] for row in values.tolist()]
    if layout.halves:
        pairs = [shares[i : i + 2] for i in range(0, len(shares), 2)]
        return [_halves(*pair) for pair in pairs]
    if not tinted and low == 0.0:
        shares = [[math.sqrt(x) if x > 0 else x for x in row] for row in shares]
    cell = _tile if tinted else _ink
    return [Text.assemble(*(cell(share) for share in row)) for row in shares]


def _pooled(values: Tensor, pool: tuple[int, int]) -> Tensor:
    return F.max_pool2d(values[None], pool, ceil_mode=True)[0] if pool != (1, 1) else values


def _ink(share: float) -> str:
    if not math.isfinite(share):
        return " ·" if share < 0 else " ?"
    return 2 * INK[min(int(share * len(INK)), len(INK) - 1)]


def _tile(share: float) -> tuple[str, Style | str]:
    return ("  ", shade(share)) if math.isfinite(share) else (_ink(share), "dim")


def _halves(upper: list[float], lower: list[float] | None = None) -> Text:
    """Two rows in one line: the upper half of each character is its ink, the lower its ground."""

    def colour(share: float) -> str:
        ground = shade(share).bgcolor if math.isfinite(share) else None
        return ground.name if ground else EMPTY

    cells = []
    for i, share in enumerate(upper):
        ground = f" on {colour(lower[i])}" if lower else ""
        cells.append(("▀", colour(share) + ground))
    return Text.assemble(*cells)


def _ruler(layout: Layout) -> str:
    """Positions above the columns, as many as have room."""
    size, pool, across = layout.columns, layout.pool[1], layout.across
    longest = len(str(layout.first + (size - 1) * pool))
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * across > longest)
    marks = [str(layout.first + j * pool).ljust(every * across) for j in range(0, size, every)]
    return "".join(marks)[: max(size * across, len(marks[-1].rstrip()))].rstrip()


def _beside(label: Text, parts: list[Text], margin: int, width: int) -> Text:
    # Spaces that end a line are cells of the map where they have a ground.
    if not any(span.style for span in parts[-1].spans):
        parts[-1].rstrip()
    line = label.copy()
    line.append(" " * (margin - line.cell_len))
    for i, part in enumerate(parts):
        line.append(part)
        if i < len(parts) - 1:
            line.append(" " * (width - part.cell_len) + BETWEEN)
    return line


def _notes(found: list[Sheet], layout: Layout, low: float, high: float, tinted: bool) -> list[Text]:
    # Shares among many are small: what starts at 0 gets its inks by the square root, finer below.
    bend = 2 if low == 0.0 and not tinted else 1
    steps = range(len(INK) + 1)
    edges = [number(low + (high - low) * (i / len(INK)) ** bend, 4) for i in steps]
    if tinted:
        ramp = [("  ", shade(i / 15)) for i in range(16)]
        legend = Text.assemble(edges[0], " ", *ramp, " ", edges[-1])
    else:
        inks = [f"“{ink}” to {edge}" for ink, edge in zip(INK, edges[1:], strict=True)]
        legend = Text(f"from {edges[0]}: " + ", ".join(inks))
    if any(bool(sheet.blocked.any()) for sheet in found):
        legend.append("; · may not look" if not layout.halves else "; grey may not look")
    notes = [legend]
    first = found[0]
    if layout.pool != (1, 1):
        rows, columns = counted(layout.pool[0], first.down), counted(layout.pool[1], first.across)
        notes.append(Text(f"Each cell is the largest of {rows} × {columns}."))
    if first.columns and first.columns != first.rows and layout.pool[1] == 1:
        names = ", ".join(
            "…" if j is None else f"{first.first[1] + j} {first.columns[j]}"
            for j in ends(len(first.columns), 24)
        )
        notes.append(Text(f"{counted(len(first.columns), first.across)}: {names}"))
    return notes
