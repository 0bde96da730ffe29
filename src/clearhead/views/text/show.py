"""Print every step of a trace: its name, formula, shape, reason and numbers."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ...core.formatting import axis_size, number, visible
from ...core.functional.trace import Step, Trace
from ..panels import Panel, choose_heads, panels, value_range
from .layout import (
    Cell,
    at_least_one,
    check_trace,
    coloured,
    indented,
    matrix,
    print_batch_note,
    shade,
    unwrapped,
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
