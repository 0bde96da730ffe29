"""Draw figures of a trace: one head, every head, the chain of steps.

They use matplotlib's objects and not pyplot, so that no figure is in global state.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ...core.errors import BadType, BadValue, as_path, kind_of, why_failed
from ...core.functional.trace import Trace
from ..panels import Panel, panel_of, panels
from . import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SMALL = 20  # most positions for which every one has a label, in a figure of several matrices

# The metadata to leave out (program, date), by suffix, so that a figure always has the same bytes.
FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def heatmap(trace: Trace, step: str = "weights", head: int = 0, ax: "Axes | None" = None) -> "Axes":
    """Draw one head of one step: tokens beside and above, numbers in the cells if they fit.

    Blocked cells are grey and hatched. A part of a larger matrix has positions beside the tokens,
    and the range of its colours in the title. Raises `BadValue` for a step or a head that does not
    exist, or a step without numbers.
    """
    canvas.must_draw("heatmap", trace, Trace, "explain(...)")
    panel = panel_of(trace, step, head, "a figure shows")
    if ax is None:
        ax = canvas.new_figure(*canvas.size(panel)).add_subplot()
    canvas.draw(ax, panel)
    ax.set_ylabel(trace.step(step).axis_name(panel.down))
    title = _title(trace, step, panel) + (f"\n{_range_of(panel)}" if panel.is_part else "")
    ax.set_title(canvas.wrap_title(title, ax.figure, margin=0.6), parse_math=False)
    return ax


@overload
def heads(trace: Trace, step: str = ..., figure: "Figure | None" = ...) -> "Figure": ...
@overload
def heads(trace: Trace, step: str = ..., *, ax: "Axes") -> "Axes": ...
def heads(
    trace: Trace,
    step: str = "weights",
    figure: "Figure | SubFigure | None" = None,
    *,
    ax: "Axes | None" = None,
) -> "Figure | SubFigure | Axes":
    """Draw every head of a step in one figure, with one colour scale.

    The scale of weights is their square root, from 0 to 1, or in a part of a larger matrix the
    range of `text.heat`. Other numbers have a scale around 0. Returns the figure, or `ax` if
    passed, which the drawing replaces.

    Raises `Missing` without matplotlib, `BadType` unless `trace` is a `Trace`, and `BadValue` if it
    has no such step, or the step no numbers.
    """
    canvas.must_draw("heads", trace, Trace, "explain(...)")
    panel_of(trace, step, 0, "a figure shows")  # raises for a step without numbers
    drawn = panels(trace, trace.step(step))
    across = min(len(drawn), 4)
    down = -(-len(drawn) // across)
    first_width, height = canvas.size(drawn[0], most=4.0)
    width, _ = canvas.size(drawn[0], most=4.0, rows=False)
    figure = canvas.figure_for(
        figure, ax, first_width + width * (across - 1) + 0.8, height * down + 0.4
    )
    axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
    ink = canvas.ink_of(drawn)
    for i, (subplot, panel) in enumerate(zip(axes, drawn, strict=False)):
        image = canvas.draw(subplot, panel, ink, rows=i % across == 0, labelled=SMALL)
        subplot.set_title(panel.title)
    for subplot in axes[len(drawn) :]:
        subplot.remove()
    ticks = ink[1].inverse(np.sqrt(canvas.WEIGHT_TICKS)) if drawn[0].is_share else None
    figure.colorbar(image, ax=axes[: len(drawn)], shrink=0.8, ticks=ticks)
    about = f"{trace.about}\n" if trace.first else ""  # describes the part of a larger trace
    title = canvas.wrap_title(canvas.drawable(about) + _title(trace, step), figure)
    figure.suptitle(title, parse_math=False)
    return ax or figure


@overload
def steps(trace: Trace, head: int = ..., figure: "Figure | None" = ...) -> "Figure": ...
@overload
def steps(trace: Trace, head: int = ..., *, ax: "Axes") -> "Axes": ...
def steps(
    trace: Trace,
    head: int = 0,
    figure: "Figure | SubFigure | None" = None,
    *,
    ax: "Axes | None" = None,
) -> "Figure | SubFigure | Axes":
    """Draw the steps of one head, from the scores to the output, side by side.

    Returns the figure, or `ax` if passed, which the drawing replaces. Raises the errors of `heads`,
    and `BadValue` if there is no such head.
    """
    canvas.must_draw("steps", trace, Trace, "explain(...)")
    names = trace.names
    first, last = (names.index(trace.step(name).name) for name in ("scores", "output"))
    chain = names[first : last + 1]
    drawn = [panel_of(trace, name, head, "a figure shows") for name in chain]
    across = len(chain) if len(chain) <= 5 else -(-len(chain) // 2)
    down = -(-len(chain) // across)
    first_width, height = canvas.size(drawn[0], most=4.0)
    width = sum(canvas.size(panel, most=4.0, rows=False)[0] for panel in drawn[1:]) / down
    figure = canvas.figure_for(figure, ax, first_width + width, height * down + 0.7)
    # In a single row, widths are proportional to columns, so that all cells have one height.
    columns = drawn[0].values.shape[1]
    ratios = [min(max(panel.values.shape[1], 2, columns / 5), 2 * columns) for panel in drawn]
    grid = figure.subplots(down, across, squeeze=False, width_ratios=ratios if down == 1 else None)
    axes = grid.ravel().tolist()
    for i, (subplot, name, panel) in enumerate(zip(axes, chain, drawn, strict=False)):
        # In two rows, a matrix of another shape has cells of another height: label its rows.
        aligned = down == 1 or panel.values.shape == drawn[0].values.shape
        canvas.draw(subplot, panel, rows=i % across == 0 or not aligned, labelled=SMALL)
        arrow = "→ " if i else ""
        # Each matrix has its own scale, which its title states.
        title = canvas.drawable(f"{arrow}{name}\n{trace.step(name).formula}".rstrip())
        title += f"\n{_range_of(panel)}"
        subplot.set_title(title, fontsize=9, parse_math=False)
    for subplot in axes[len(chain) :]:
        subplot.remove()
    if drawn[0].title:
        figure.suptitle(drawn[0].title)
    return ax or figure


def suffix_of(path: Path) -> str:
    """Return the suffix of a figure's file, its format. Raises `BadValue` for an unknown one."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        rule = "the suffix is the format, one of " + ", ".join(FORMATS) + "."
        hint = f"name it for example {path.stem + '.png'!r}."
        raise BadValue(f"A figure cannot be saved as {str(path)!r}.", rule, hint)
    return suffix


def save(figure: "Figure | Axes", path: str | Path) -> Path:
    """Write a figure, or that of an Axes, as PNG, SVG or PDF, by the suffix.

    The same figure gives the same bytes. Raises `BadType` for another type, `BadValue` if it cannot
    be written.
    """
    canvas.require_matplotlib()
    import matplotlib

    path = as_path("save", path)
    suffix = suffix_of(path)
    root: Any = getattr(figure, "figure", None)
    if not hasattr(root, "savefig"):
        rule = "it writes a figure, or the figure of an Axes."
        hint = "pass the result of heatmap(...), heads(...) or steps(...)."
        raise BadType(f"save got {kind_of(figure)}.", rule, hint)
    try:
        with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
            root.savefig(path, dpi=150, format=suffix[1:], metadata=FORMATS[suffix])
    except (OSError, ValueError) as error:
        gave = f"The figure could not be written to {str(path)!r} ({why_failed(error)})."
        rule = "a figure is written to a file in an existing folder with write permission."
        raise BadValue(gave, rule, "create the folder first, or name another file.") from error
    return path


def _range_of(panel: Panel) -> str:
    _, scale = canvas.ink_of([panel])
    return f"colours {scale.vmin:.3g} to {scale.vmax:.3g}"


def _title(trace: Trace, step: str, panel: Panel | None = None) -> str:
    formula = trace.step(step).formula
    name = canvas.drawable(f"{step} = {formula}" if formula else step)
    return f"{name}\n{panel.title}" if panel and panel.title else name
