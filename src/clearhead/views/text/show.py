"""Every step of a trace, as a person would lay it out on a page."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ...results.trace import Step, Trace
from ..escape import visible
from ..panels import Sheet, choose_heads, counted, number, sheets, span
from .layout import (
    Cell,
    at_least_one,
    checked,
    coloured,
    first_of_many,
    indented,
    matrix,
    paper,
    shade,
)

LETTERS = {
    "B": "sequences",
    "H": "heads",
    "G": "key heads",
    "Tq": "queries",
    "Tk": "keys",
    "D": "features of a head",
    "Dv": "features of a value",
}


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
    width too. Without a terminal the text is plain and never cut. `console=None` writes to standard
    output, `heads=None` shows all. Raises `BadValue` for a head that is not there.
    """
    checked(trace, decimals)
    most = at_least_one("most", most)
    choose_heads(trace, heads)
    with paper(console) as out:
        if trace.about:
            out.print(Text(visible(trace.about, 10_000)))
            if letters := _letters(trace.about):
                out.print(Text(letters, style="dim"))
        first_of_many(out, trace)
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


def _letters(about: str) -> str:
    """What the letters of a line like ``B=1 H=2 Tq=6`` stand for."""
    said = (f"{letter} {LETTERS[letter]}" for letter in re.findall(r"\b(\w+)=", about)
            if letter in LETTERS)  # fmt: skip
    return ", ".join(said)


def heading(at: int | None, step: Step) -> Text:
    """For example ``4. scores = Q Kᵀ``; without a number where a step is shown alone."""
    formula = f" = {step.formula}" if step.formula else ""
    return Text.assemble((step.name if at is None else f"{at}. {step.name}", "bold"), formula)


def shape(step: Step) -> str:
    """For example ``2 heads × 5 queries × 5 keys``."""
    return " × ".join(
        counted(size, step.called(letter))
        for letter, size in zip(step.axes.split(), step.shape, strict=True)
    )


def _numbers(out: Console, step: Step, sheet: Sheet, decimals: int, most: int) -> Text:
    places = decimals if step.tensor.is_floating_point() else 0
    shares = step.name in ("weights", "dropped")
    tinted = coloured(out) and shares
    top = max(span([sheet])[1], 1e-30)
    values, blocked, sums = sheet.values.numpy(), sheet.blocked.numpy(), sheet.values.sum(1).numpy()

    def cell(i: int, j: int) -> Cell:
        text = " " + number(sums[i] if j < 0 else values[i, j], places)
        if j < 0 or not (tinted or blocked[i, j]):
            return text, ""
        return text, "dim" if blocked[i, j] else shade(values[i, j] / top)

    return matrix(out, sheet, cell, most, sums=shares)


def _ticks(out: Console, found: list[Sheet], most: int) -> None:
    """Who may look at whom, once where every head has the same mask."""
    same = all(torch.equal(sheet.blocked, found[0].blocked) for sheet in found)
    for sheet in found[:1] if same else found:
        whose = "every head" if same and len(found) > 1 else sheet.title
        title = f"{whose}: ".lstrip(": ") + "✓ may look, ✗ may not"
        room = len(str(sheet.values.shape[1] - 1))

        def cell(i: int, j: int, blocked: Tensor = sheet.blocked, room: int = room) -> Cell:
            mark, style = ("✗", "red") if blocked[i, j] else ("✓", "green")
            return mark.rjust(room), style

        out.print()
        out.print(indented(Text(title)))
        out.print(indented(matrix(out, replace(sheet, columns=None), cell, 2 * most)))
