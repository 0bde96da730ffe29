"""Figures of a trace: one head, every head, the chain of steps.

They are made with matplotlib's objects and no global state; none is shown or kept.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ...errors import BadType, BadValue, kind_of, why_failed
from ...results.trace import Trace
from ..panels import Sheet, number, sheets, span
from .canvas import draw, drawable, in_lines, new_figure, require_matplotlib, room_for, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

SMALL = 20  # positions up to which each has its label, where several matrices share a figure

# By suffix, what a file would say of its maker and its day, left out: the same figure, the same
# bytes.
FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def heatmap(trace: Trace, step: str = "weights", head: int = 0, ax: "Axes | None" = None) -> "Axes":
    """One head of one step: tokens beside and above, numbers in the cells where they fit.

    What the mask blocks is grey and hatched. Raises `BadValue` for a step or a head that is not
    there, or a step without numbers.
    """
    require_matplotlib()
    sheet = _sheet(trace, step, head)
    if ax is None:
        ax = new_figure(*size(sheet)).add_subplot()
    draw(ax, sheet)
    ax.set_title(in_lines(_title(trace, step, sheet), ax.figure, beside=0.6), parse_math=False)
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
    """Every head of a step in one figure, all in one range of colour, with one scale.

    Returns the figure; with `ax`, whose place it takes, that.
    """
    require_matplotlib()
    _sheet(trace, step, 0)
    found = sheets(trace, trace.step(step))
    across = min(len(found), 4)
    down = -(-len(found) // across)
    beside, height = size(found[0], most=4.0)
    width, _ = size(found[0], most=4.0, rows=False)
    figure = room_for(figure, ax, beside + width * (across - 1) + 0.8, height * down + 0.4)
    axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
    low, high = span(found)
    for i, (place, sheet) in enumerate(zip(axes, found, strict=False)):
        image = draw(place, sheet, low, high, rows=i % across == 0, labelled=SMALL)
        place.set_title(sheet.title or step)
    for place in axes[len(found) :]:
        place.remove()
    figure.colorbar(image, ax=axes[: len(found)], shrink=0.8)
    about = f"{trace.about}\n" if trace.first else ""  # of a part: which
    title = in_lines(drawable(about) + _title(trace, step), figure)
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
    """The chain of one head, from the scores to the output, side by side.

    Returns the figure; with `ax`, whose place it takes, that.
    """
    require_matplotlib()
    names = trace.names
    first, last = (names.index(trace.step(name).name) for name in ("scores", "output"))
    chain = names[first : last + 1]
    found = [_sheet(trace, name, head) for name in chain]
    across = len(chain) if len(chain) <= 5 else -(-len(chain) // 2)
    down = -(-len(chain) // across)
    beside, height = size(found[0], most=4.0)
    width = sum(size(sheet, most=4.0, rows=False)[0] for sheet in found[1:]) / down
    figure = room_for(figure, ax, beside + width, height * down + 0.7)
    widest = found[0].values.shape[1]
    # In a lone row each matrix is as wide as its columns ask, so that all rows are level.
    ratios = (
        [min(max(sheet.values.shape[1], 2, widest / 5), 2 * widest) for sheet in found]
        if down == 1
        else None
    )
    grid = figure.subplots(down, across, squeeze=False, width_ratios=ratios)
    axes = grid.ravel().tolist()
    for i, (place, name, sheet) in enumerate(zip(axes, chain, found, strict=False)):
        # Below one another, a matrix of another shape has rows of another height.
        alike = down == 1 or sheet.values.shape == found[0].values.shape
        draw(place, sheet, rows=i % across == 0 or not alike, labelled=SMALL)
        arrow = "→ " if i else ""
        low, high = span([sheet])
        # Each matrix has colours of its own; its title says what they span.
        spread = f"colours {number(low, 2)} to {number(high, 2)}"
        title = drawable(f"{arrow}{name}\n{trace.step(name).formula}".rstrip() + f"\n{spread}")
        place.set_title(title, fontsize=9, parse_math=False)
    for place in axes[len(chain) :]:
        place.remove()
    if found[0].title:
        figure.suptitle(found[0].title)
    return ax or figure


def suffix_of(path: Path) -> str:
    """The suffix that says the format. Raises `BadValue` for one that says none."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise BadValue(
            f"A figure was to be saved as {str(path)!r}.",
            "the suffix says the format, which is one of " + ", ".join(FORMATS) + ".",
            f"name it for example {path.stem + '.png'!r}.",
        )
    return suffix


def save(figure: "Figure | Axes", path: str | Path) -> Path:
    """Write a figure, or that of an Axes, as PNG, SVG or PDF, by the suffix; the same figure gives
    the same bytes. Raises `BadType` for another kind, `BadValue` where it cannot be written."""
    require_matplotlib()
    import matplotlib

    path = Path(path)
    suffix = suffix_of(path)
    whole: Any = getattr(figure, "figure", None)
    if not hasattr(whole, "savefig"):
        raise BadType(
            f"save was given {kind_of(figure)}.",
            "it writes figures, and the figure of an Axes.",
            "pass what heatmap(...), heads(...) or steps(...) returned.",
        )
    try:
        with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
            whole.savefig(path, dpi=150, format=suffix[1:], metadata=FORMATS[suffix])
    except (OSError, ValueError) as error:
        raise BadValue(
            f"The figure could not be written to {str(path)!r} ({why_failed(error)}).",
            "a figure is written to a file in a folder that exists and may be written to.",
            "make the folder first, or name another file.",
        ) from error
    return path


def _sheet(trace: Trace, step: str, head: int) -> Sheet:
    found = sheets(trace, trace.step(step), [head])
    if found:
        return found[0]
    raise BadValue(
        f"The step {step!r} has the shape {trace.step(step).shape}.",
        "a figure shows numbers, and here are none.",
        "explain at least one token of at least one feature.",
    )


def _title(trace: Trace, step: str, sheet: Sheet | None = None) -> str:
    formula = trace.step(step).formula
    name = drawable(f"{step} = {formula}" if formula else step)
    return f"{name}\n{sheet.title}" if sheet and sheet.title else name
