"""Draw small heat maps of every head, side by side, in a terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from ...core.formatting import axis_size, ends, number
from ...core.functional.trace import Trace
from ..panels import Panel, map_range, panels
from .show import check_trace, coloured, heading, print_batch_note, shade, unwrapped

BLOCKS = " ░▒▓█"
PAGE_WIDTH = 100  # characters, without a terminal
MOST_ROWS = 50  # of characters; a taller map is pooled to fit a screen
BETWEEN = "   "
BLOCKED = "rgb(58,58,58)"  # for half a character, which is too small for a mark


@dataclass(frozen=True)
class Layout:
    """The layout of the maps: the positions that a cell pools, and the labels beside the maps.

    `cell_width` is in characters; with `half_blocks`, one character shows two rows. `first` is the
    number of the first column.
    """

    pool: tuple[int, int]
    cell_width: int
    half_blocks: bool
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
    layer: int | None = None,
) -> None:
    """Print a map of each head: dark to bright in a terminal with colours, ░ to █ elsewhere.

    All maps have one range, so that heads can be compared: from 0, or from the smallest number if
    that is more than half of the largest. A map too large for the page is pooled by its maximum,
    which is printed. The titles have the `layer`, unless it is None. Raises `BadValue` for a step
    or a head that does not exist.
    """
    check_trace(trace, 0)
    drawn = panels(trace, trace.step(step), heads)
    if layer is not None:
        drawn = [replace(panel, title=_in_layer(panel.title, layer)) for panel in drawn]
    with unwrapped(console) as out:
        out.print(heading(None, trace.step(step)))
        print_batch_note(out, trace)
        if not drawn:
            out.print(Text("This step has no numbers."))
            return
        in_colour = coloured(out)
        page_width = out.width if out.is_terminal else PAGE_WIDTH
        layout = _layout(drawn[0], page_width, in_colour)
        low, high = map_range(drawn)
        width = max(layout.columns * layout.cell_width, *(len(panel.title) for panel in drawn))
        per_row = max(1, (page_width - layout.margin + len(BETWEEN)) // (width + len(BETWEEN)))
        for start in range(0, len(drawn), per_row):
            row = drawn[start : start + per_row]
            out.print()
            if any(panel.title for panel in row):
                titles = [Text(panel.title, style="bold") for panel in row]
                out.print(_beside(Text(), titles, layout.margin, width))
            ruler = Text(_ruler(layout), style="dim")
            out.print(_beside(Text(), [ruler] * len(row), layout.margin, width))
            maps = [_map(panel, layout, low, high, in_colour) for panel in row]
            for label, *lines in zip(layout.labels, *maps, strict=True):
                out.print(_beside(Text(label), lines, layout.margin, width))
        out.print()
        for note in _notes(drawn, layout, low, high, in_colour):
            out.print(note)


def _in_layer(title: str, layer: int) -> str:
    """Return the title of a head in a layer: L2H3 for "head 3"."""
    if title.startswith("head "):
        return title.replace("head ", f"L{layer}H", 1)
    return f"layer {layer}, {title}".removesuffix(", ")


def _layout(panel: Panel, page_width: int, in_colour: bool) -> Layout:
    rows, columns = panel.values.shape
    digits = len(str(panel.first[0] + rows - 1))
    labels = [
        f"{panel.first[0] + i:>{digits}} {panel.rows[i] if panel.rows else ''}".rstrip()
        for i in range(rows)
    ]
    unpooled = Layout((1, 1), 2, False, labels, columns, panel.first[1])
    if rows <= MOST_ROWS and unpooled.margin + 2 * columns <= page_width:
        return unpooled
    # In colour, the upper and the lower half of a character are separate cells.
    cell_width, rows_per_line = (1, 2) if in_colour else (2, 1)
    most_columns = max(1, (page_width - digits - 1) // cell_width)
    pool = (-(-rows // (MOST_ROWS * rows_per_line)), -(-columns // most_columns))
    if rows == columns:  # the diagonal of a square matrix stays a diagonal
        pool = (max(pool), max(pool))
    labels = [f"{panel.first[0] + i:>{digits}}" for i in range(0, rows, pool[0] * rows_per_line)]
    return Layout(pool, cell_width, in_colour, labels, -(-columns // pool[1]), panel.first[1])


def _map(panel: Panel, layout: Layout, low: float, high: float, in_colour: bool) -> list[Text]:
    values = _pooled(panel.values.masked_fill(panel.blocked, -math.inf), layout.pool)
    spread = (high - low) or 1.0
    fractions = [[(x - low) / spread for x in row] for row in values.tolist()]
    if layout.half_blocks:
        pairs = [fractions[i : i + 2] for i in range(0, len(fractions), 2)]
        return [_half_blocks(*pair) for pair in pairs]
    if not in_colour and low == 0.0:
        fractions = [[math.sqrt(x) if x > 0 else x for x in row] for row in fractions]
    cell = _colour_cell if in_colour else _text_cell
    return [Text.assemble(*(cell(x) for x in row)) for row in fractions]


def _pooled(values: Tensor, pool: tuple[int, int]) -> Tensor:
    return F.max_pool2d(values[None], pool, ceil_mode=True)[0] if pool != (1, 1) else values


def _text_cell(fraction: float) -> str:
    if not math.isfinite(fraction):
        return " ·" if fraction < 0 else " ?"
    return 2 * BLOCKS[min(int(fraction * len(BLOCKS)), len(BLOCKS) - 1)]


def _colour_cell(fraction: float) -> tuple[str, Style | str]:
    return ("  ", shade(fraction)) if math.isfinite(fraction) else (_text_cell(fraction), "dim")


def _half_blocks(upper: list[float], lower: list[float] | None = None) -> Text:
    """Return two rows of a map as one line of half blocks.

    The upper row is the foreground of each character, the lower row the background.
    """

    def colour(fraction: float) -> str:
        background = shade(fraction).bgcolor if math.isfinite(fraction) else None
        return background.name if background else BLOCKED

    cells = []
    for i, fraction in enumerate(upper):
        background = f" on {colour(lower[i])}" if lower else ""
        cells.append(("▀", colour(fraction) + background))
    return Text.assemble(*cells)


def _ruler(layout: Layout) -> str:
    """Return the numbers of the columns, as many as fit above them."""
    size, pool, width = layout.columns, layout.pool[1], layout.cell_width
    longest = len(str(layout.first + (size - 1) * pool))
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * width > longest)
    numbers = [str(layout.first + j * pool).ljust(every * width) for j in range(0, size, every)]
    return "".join(numbers)[: max(size * width, len(numbers[-1].rstrip()))].rstrip()


def _beside(label: Text, parts: list[Text], margin: int, width: int) -> Text:
    # Spaces at the end of a line are cells of the map if they have a background.
    if not any(span.style for span in parts[-1].spans):
        parts[-1].rstrip()
    line = label.copy()
    line.append(" " * (margin - line.cell_len))
    for i, part in enumerate(parts):
        line.append(part)
        if i < len(parts) - 1:
            line.append(" " * (width - part.cell_len) + BETWEEN)
    return line


def _short(x: float) -> str:
    """Write a number with at most four decimals: 0.04, not 0.0400."""
    text = number(x, 4)
    return text if "e" in text or "." not in text else text.rstrip("0").rstrip(".")


def _notes(
    drawn: list[Panel], layout: Layout, low: float, high: float, in_colour: bool
) -> list[Text]:
    # There are only five blocks, and weights on many keys are small. If the range begins at 0,
    # blocks follow the square root of the number, so that small numbers differ.
    if in_colour:
        ramp = [("  ", shade(i / 15)) for i in range(16)]
        legend = Text.assemble(number(low, 4), " ", *ramp, " ", number(high, 4))
    else:
        exponent = 2 if low == 0.0 else 1
        edges = [low + (high - low) * (i / len(BLOCKS)) ** exponent for i in range(len(BLOCKS))]
        named = list(zip(["blank", *BLOCKS[1:]], map(_short, edges), strict=True))
        (block, edge), *others = named[1:] if low == 0.0 else named
        legend = Text(", ".join([f"{block} from {edge}", *map(" ".join, others)]))
    if any(bool(panel.blocked.any()) for panel in drawn):
        legend.append("; · may not look" if not layout.half_blocks else "; grey may not look")
    notes = [legend]
    first = drawn[0]
    if layout.pool != (1, 1):
        rows = axis_size(layout.pool[0], first.down)
        columns = axis_size(layout.pool[1], first.across)
        notes.append(Text(f"Each cell is the largest of {rows} × {columns}."))
    if first.columns and first.columns != first.rows and layout.pool[1] == 1:
        names = ", ".join(
            "…" if j is None else f"{first.first[1] + j} {first.columns[j]}"
            for j in ends(len(first.columns), 24)
        )
        notes.append(Text(f"{axis_size(len(first.columns), first.across)}: {names}"))
    return notes
