"""Every step of a trace, as a person would lay it out on a page."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ...trace import Step, Trace
from ..sheet import Sheet, counted, number, sheets, size_of, visible
from .paper import coloured, indented, matrix, paper, tint


def show(
    trace: Trace,
    *,
    console: Console | None = None,
    heads: Sequence[int] | None = None,
    decimals: int = 4,
    most: int = 12,
) -> None:
    """Print each step: its number, name and formula, its shape, its reason, its numbers.

    Rows and columns beyond `most` are elided in the middle, and in a terminal columns beyond its
    width too. Without a terminal the text is plain and never cut. Raises `BadValue` for a head
    that is not there.
    """
    with paper(console) as out:
        if trace.about:
            out.print(Text(visible(trace.about, 10_000)))
        if (size_of(trace, "b") or 1) > 1:
            out.print(Text(f"A batch of {size_of(trace, 'b')}: the first is shown."))
        for at, step in enumerate(trace, 1):
            found = sheets(trace, step, heads)
            out.print()
            out.print(heading(at, step))
            out.print(indented(Text(shape(step))))
            if step.why:
                out.print(indented(Text(step.why, style="italic")))
            if step.name == "masked":
                _ticks(out, found, most)
            for sheet in found:
                out.print()
                if sheet.title:
                    out.print(indented(Text(sheet.title, style="bold")))
                out.print(indented(_numbers(out, step, sheet, decimals, most)))


def heading(at: int, step: Step) -> Text:
    """For example ``4. scores = Q Kᵀ``."""
    formula = f" = {step.formula}" if step.formula else ""
    return Text.assemble((f"{at}. {step.name}", "bold"), formula)


def shape(step: Step) -> str:
    """For example ``2 heads × 5 queries × 5 keys``."""
    return " × ".join(
        counted(size, letter) for letter, size in zip(step.axes.split(), step.shape, strict=True)
    )


def _numbers(out: Console, step: Step, sheet: Sheet, decimals: int, most: int) -> Table:
    places = decimals if step.tensor.is_floating_point() else 0
    shares = step.name in ("weights", "dropped")
    top = max(float(sheet.values.nan_to_num(0.0).max()), 1e-30)
    tinted = coloured(out) and shares

    def cell(i: int, j: int) -> RenderableType:
        x = float(sheet.values[i, j])
        if sheet.blocked[i, j]:
            return Text(" " + number(x, places), style="dim")
        return tint(" " + number(x, places), x / top) if tinted else Text(" " + number(x, places))

    sums = [Text(" " + number(float(x), places)) for x in sheet.values.sum(1)] if shares else None
    return matrix(out, sheet, cell, most, sums=sums)


def _ticks(out: Console, found: list[Sheet], most: int) -> None:
    """Who may look at whom, once where every head has the same mask."""
    same = all(torch.equal(sheet.blocked, found[0].blocked) for sheet in found)
    for sheet in found[:1] if same else found:
        whose = "every head" if same and len(found) > 1 else sheet.title
        title = f"{whose}: ".lstrip(": ") + "✓ may look, ✗ may not"
        room = len(str(sheet.values.shape[1] - 1))

        def cell(i: int, j: int, blocked: Tensor = sheet.blocked, room: int = room) -> Text:
            mark, style = ("✗", "red") if blocked[i, j] else ("✓", "green")
            return Text(mark.rjust(room), style=style)

        out.print()
        out.print(indented(Text(title)))
        out.print(indented(matrix(out, replace(sheet, columns=None), cell, 2 * most)))
