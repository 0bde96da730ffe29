"""The canvas a sheet is drawn on: its size, its cells, the labels beside and above them."""

import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from ...errors import Missing
from ...results.trace import AXES
from ..panels import Sheet, number, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage
    from matplotlib.patches import PathPatch

ANNOTATED = 12  # rows and columns up to which every cell carries its number
LABELLED = 40  # positions up to which every one has its label
HATCHED = 64  # blocked rows and columns up to which hatches are still seen as such


def can_draw() -> bool:
    """Whether matplotlib is there; clearhead does without it, and then draws no figures."""
    try:
        import matplotlib.figure  # noqa: F401  # only whether it can be imported
    except ImportError:
        return False
    return True


def require_matplotlib() -> None:
    """Raises `Missing`, which says what to install, where matplotlib is missing."""
    if not can_draw():
        raise Missing(
            "A figure was asked for, and matplotlib is not installed.",
            "figures are drawn with matplotlib, which clearhead does not require.",
            "pip install 'clearhead[plot]'",
        )


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    # Matrices keep square cells, and this layout packs what keeps its own shape.
    figure = Figure(figsize=(width, height), layout="compressed")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]  # the layout named above, which has pads
    return figure


def room_for(
    figure: "Figure | SubFigure | None", ax: "Axes | None", width: float, height: float
) -> "Figure | SubFigure":
    """The figure that was given; or one in the place of `ax`, which stays, empty; or a new one."""
    if ax is None:
        return figure or new_figure(width, height)
    ax.set_axis_off()
    spec, box = ax.get_subplotspec(), ax.get_position()
    inside = ax.figure.add_subfigure(spec or ax.figure.add_gridspec(1, 1)[0])
    if spec is None:  # it stands where it was put, in no grid
        inside.bbox_relative.p0, inside.bbox_relative.p1 = box.p0, box.p1
    return inside


def in_lines(
    text: str, figure: "Figure | SubFigure", points: float = 12.0, beside: float = 0.0
) -> str:
    """The text in lines that fit the figure, of which so many inches are beside the title, in
    letters of so many points."""
    inches = figure.bbox.width / figure.dpi - beside
    most = max(12, int(inches * 72 / (0.55 * points)))
    lines = (line for given in text.split("\n") for line in textwrap.wrap(given, most) or [""])
    return "\n".join(lines)


def size(sheet: Sheet, most: float = 7.0, rows: bool = True) -> tuple[float, float]:
    """Inches: half of one for each cell up to `most`, and the labels and the title around them."""
    down, across = sheet.values.shape
    beside = max((len(drawable(token)) for token in sheet.rows or [""]), default=0) * rows
    labels = [drawable(token) for token in sheet.columns or []]
    above = max(map(len, labels)) if _turned(labels, across) else 0
    return (
        0.6 + 0.1 * beside + min(max(0.5 * across, 1.5), most) + 0.04 * above,
        1.3 + 0.08 * above + min(max(0.5 * down, 0.8), most),
    )


def draw(
    ax: "Axes",
    sheet: Sheet,
    low: float | None = None,
    high: float | None = None,
    rows: bool = True,
    labelled: int = LABELLED,
) -> "AxesImage":
    """The matrix of a sheet on `ax`; `rows` says whether its tokens are written beside it, and
    `labelled` up to how many positions each has its label."""
    import matplotlib

    if low is None or high is None:
        low, high = span([sheet])
    values, blocked = sheet.values.numpy(), sheet.blocked.numpy()
    image = ax.imshow(
        np.ma.array(values, mask=blocked | ~np.isfinite(values)),
        cmap=matplotlib.colormaps["viridis"].with_extremes(bad="0.92"),
        vmin=low,
        vmax=high,
        interpolation="nearest",
        # Square cells, unless a few tokens of many features would be a mere line.
        aspect="equal" if max(values.shape) <= 4 * min(values.shape) else "auto",
    )
    if blocked.any() and max(values.shape) <= HATCHED:
        ax.add_patch(_hatch(blocked))
    if max(values.shape) <= ANNOTATED:
        _annotate(ax, values, blocked, (low, high))
    _label_columns(ax, sheet, labelled)
    if rows:
        _label_rows(ax, sheet, labelled)
    else:
        ax.set_yticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


def drawable(text: str) -> str:
    """`text` with what the font cannot draw written out, as ``⟨4F60⟩`` for its code point."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    left, right = "⟨⟩" if font.get_char_index(ord("⟨")) else "<>"
    return "".join(
        char if char == "\n" or font.get_char_index(ord(char)) else f"{left}{ord(char):04X}{right}"
        for char in text
    )


def _hatch(blocked: np.ndarray) -> "PathPatch":
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]]) - 0.5
    cells = [Outline(corners + np.array([j, i]), closed=True) for i, j in np.argwhere(blocked)]
    return PathPatch(
        Outline.make_compound_path(*cells),
        hatch="////",
        facecolor="none",
        edgecolor="0.78",
        linewidth=0,
    )


def _annotate(
    ax: "Axes", values: np.ndarray, blocked: np.ndarray, limits: tuple[float, float]
) -> None:
    low, high = limits
    middle = low + 0.6 * (high - low)
    for (i, j), x in np.ndenumerate(values):
        if not blocked[i, j]:
            ink = "black" if x > middle or not math.isfinite(x) else "white"
            ax.text(j, i, number(x, 2), ha="center", va="center", color=ink, fontsize=8)


def _label_columns(ax: "Axes", sheet: Sheet, most: int) -> None:
    places, labels = _ticks(sheet.columns, sheet.values.shape[1], sheet.first[1], most)
    ax.set_xticks(places, labels=labels, parse_math=False)
    ax.set_xlabel(AXES.get(sheet.across, sheet.across))
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("bottom")
    if _turned(labels, sheet.values.shape[1]):
        for label in ax.get_xticklabels():
            label.set(rotation=45, ha="left", rotation_mode="anchor")


def _label_rows(ax: "Axes", sheet: Sheet, most: int) -> None:
    places, labels = _ticks(sheet.rows, sheet.values.shape[0], sheet.first[0], most)
    ax.set_yticks(places, labels=labels, parse_math=False)
    ax.set_ylabel(AXES.get(sheet.down, sheet.down))


def _ticks(
    tokens: list[str] | None, size: int, first: int, most: int
) -> tuple[list[int], list[str]]:
    """Tokens, or positions where there are none; every so many where there are too many."""
    places = list(range(0, size, -(-size // most)))
    return places, [drawable(tokens[i]) if tokens else str(first + i) for i in places]


def _turned(labels: list[str], columns: int) -> bool:
    """Whether labels are too long to lie above their columns, which are narrow where many."""
    return max(map(len, labels), default=0) > (5 if columns <= ANNOTATED else 2)
