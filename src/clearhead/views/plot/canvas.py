"""Draw a panel on matplotlib axes: figure size, cells, and the labels beside and above them.

Colours are those of the page. The scale of weights is their square root, from 0 to 1; signed
numbers have a scale around 0. Weights of a part of a larger matrix may all be small, so they have
the range of a terminal.
"""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import Missing, how_to_install, must_be
from ...core.formatting import AXES, number
from ..colours import DIVERGING, SEQUENTIAL
from ..panels import Panel, map_range, value_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.image import AxesImage
    from matplotlib.patches import PathPatch

WEIGHT_TICKS = 0, 0.1, 0.5, 1  # of the colour bar of weights, as fractions of its range


def weight_ink(low: float = 0.0, high: float = 1.0) -> "tuple[Colormap, Normalize]":
    """Return colours and scale of weights, the same for any number of tokens."""
    from matplotlib.colors import PowerNorm

    return _colours(SEQUENTIAL["light"]), PowerNorm(0.5, vmin=low, vmax=high or 1.0, clip=True)


def signed_ink(limit: float) -> "tuple[Colormap, Normalize]":
    """Return colours and scale of numbers from -limit to limit."""
    from matplotlib.colors import Normalize

    return _colours(DIVERGING["light"]), Normalize(-limit, limit)


def ink_of(drawn: Sequence[Panel]) -> "tuple[Colormap, Normalize]":
    """Return common colours and scale for panels of one step."""
    if not drawn[0].is_share:
        return signed_ink(max(map(abs, value_range(drawn))) or 1.0)
    return weight_ink(*map_range(drawn)) if drawn[0].is_part else weight_ink()


def _colours(points: Sequence[tuple[int, int, int]]) -> "Colormap":
    from matplotlib.colors import LinearSegmentedColormap

    colours = [[channel / 255 for channel in point] for point in points]
    return LinearSegmentedColormap.from_list("clearhead", colours).with_extremes(bad="0.92")


ACCENT = "#14637f"
ANNOTATED = 12  # most rows and columns for which every cell has its number
LABELLED = 40  # most positions for which every one has its label
HATCHED = 64  # most rows and columns for which blocked cells are hatched


def can_draw() -> bool:
    """Return whether matplotlib is installed; without it clearhead draws no figures."""
    try:
        import matplotlib.figure  # noqa: F401  # only whether it can be imported
    except ImportError:
        return False
    return True


def require_matplotlib() -> None:
    """Raise `Missing` if matplotlib is not installed."""
    if not can_draw():
        gave = "A figure was requested, and matplotlib is not installed."
        raise Missing(gave, "figures need matplotlib.", how_to_install("plot"))


def must_draw(name: str, result: object, kind: type, made_by: str) -> None:
    """Raise `Missing` without matplotlib, and `BadType` unless `result` is what this figure shows.

    The call `made_by` returns it.
    """
    require_matplotlib()
    must_be(name, result, kind, made_by)


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    # Matrices have square cells, and this layout removes the space around fixed shapes.
    figure = Figure(figsize=(width, height), layout="compressed")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]  # the compressed layout has pads
    return figure


def figure_for(
    figure: "Figure | SubFigure | None", ax: "Axes | None", width: float, height: float
) -> "Figure | SubFigure":
    """Return `figure`, a subfigure that replaces `ax`, or a new figure of this size in inches."""
    if ax is None:
        return figure or new_figure(width, height)
    ax.set_axis_off()
    spec, box = ax.get_subplotspec(), ax.get_position()
    subfigure = ax.figure.add_subfigure(spec or ax.figure.add_gridspec(1, 1)[0])
    if spec is None:  # axes outside any grid
        subfigure.bbox_relative.p0, subfigure.bbox_relative.p1 = box.p0, box.p1
    return subfigure


def wrap_title(
    text: str, figure: "Figure | SubFigure", points: float = 12.0, margin: float = 0.0
) -> str:
    """Wrap a text to the width of the figure less a margin in inches, at a font size in points."""
    inches = figure.bbox.width / figure.dpi - margin
    most = max(12, int(inches * 72 / (0.55 * points)))
    lines = (line for part in text.split("\n") for line in textwrap.wrap(part, most) or [""])
    return "\n".join(lines)


def size(panel: Panel, most: float = 7.0, rows: bool = True) -> tuple[float, float]:
    """Return width and height in inches: half an inch per cell, up to `most`, plus the labels.

    `rows` is whether the rows have labels.
    """
    down, across = panel.values.shape
    row_label = max(map(len, _tokens(panel, 0)), default=0) * rows
    labels = _tokens(panel, 1)
    column_label = max(map(len, labels)) if _rotated(labels, across) else 0
    return (
        0.6 + 0.1 * row_label + min(max(0.5 * across, 1.5), most) + 0.04 * column_label,
        1.3 + 0.08 * column_label + min(max(0.5 * down, 0.8), most),
    )


def draw(
    ax: "Axes", panel: Panel, ink: "tuple[Colormap, Normalize] | None" = None, rows: bool = True,
    labelled: int = LABELLED,
) -> "AxesImage":  # fmt: skip
    """Draw the matrix of a panel on `ax`.

    `ink` are its colours and scale; None means those of the panel. `rows` is whether rows have
    labels, and `labelled` the most positions for which every one has a label.
    """
    colours, scale = ink or ink_of([panel])
    values, blocked = panel.values.numpy(), panel.blocked.numpy()
    # Square cells, unless a few tokens with many features would become a thin line.
    is_square = max(values.shape) <= 4 * min(values.shape)
    cells = np.ma.array(values, mask=blocked | ~np.isfinite(values))
    image = ax.imshow(cells, cmap=colours, norm=scale, aspect="equal" if is_square else "auto")
    image.set_interpolation("nearest")
    if blocked.any() and max(values.shape) <= HATCHED:
        ax.add_patch(_hatch(blocked))
    if max(values.shape) <= ANNOTATED:
        _annotate(ax, values, blocked, image)
    _label_columns(ax, panel, labelled)
    if rows:
        _label_rows(ax, panel, labelled)
    else:
        ax.set_yticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


def drawable(text: str) -> str:
    """Replace characters that the font cannot draw by their code points, such as ``⟨4F60⟩``."""
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
    outline = Outline.make_compound_path(*cells)
    return PathPatch(outline, hatch="////", facecolor="none", edgecolor="0.78", linewidth=0)


def _annotate(ax: "Axes", values: np.ndarray, blocked: np.ndarray, image: "AxesImage") -> None:
    for (i, j), x in np.ndenumerate(values):
        if not blocked[i, j]:
            red, green, blue, _ = image.to_rgba(x) if math.isfinite(x) else (1.0, 1.0, 1.0, 1.0)
            colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
            ax.text(j, i, number(x, 2), ha="center", va="center", color=colour, fontsize=8)


def _label_columns(ax: "Axes", panel: Panel, most: int) -> None:
    positions, labels = _ticks(panel, 1, most)
    ax.set_xticks(positions, labels=labels, parse_math=False)
    ax.set_xlabel(AXES.get(panel.across, panel.across))
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("bottom")
    if _rotated(labels, panel.values.shape[1]):
        for label in ax.get_xticklabels():
            label.set(rotation=45, ha="left", rotation_mode="anchor")


def _label_rows(ax: "Axes", panel: Panel, most: int) -> None:
    positions, labels = _ticks(panel, 0, most)
    ax.set_yticks(positions, labels=labels, parse_math=False)
    ax.set_ylabel(AXES.get(panel.down, panel.down))


def _ticks(panel: Panel, axis: int, most: int) -> tuple[list[int], list[str]]:
    """Return at most `most` evenly spaced positions, and their tokens, or numbers if unknown."""
    size, first, tokens = panel.values.shape[axis], panel.first[axis], _tokens(panel, axis)
    positions = list(range(0, size, -(-size // most)))
    return positions, [tokens[i] if tokens else str(first + i) for i in positions]


def _tokens(panel: Panel, axis: int) -> list[str]:
    """Return the tokens of the rows (0) or columns (1), if known.

    In a part of a larger matrix, each token follows its position there.
    """
    tokens = [drawable(token) for token in (panel.rows, panel.columns)[axis] or ()]
    if not panel.is_part:
        return tokens
    return [f"{panel.first[axis] + i} {token}" for i, token in enumerate(tokens)]


def _rotated(labels: list[str], columns: int) -> bool:
    """Return whether labels are rotated, because they are wider than their columns."""
    return max(map(len, labels), default=0) > (5 if columns <= ANNOTATED else 2)
