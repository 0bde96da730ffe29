"""Attention on paper: figures of a trace, made with matplotlib's objects and no global state.

Every function makes its own figure, or draws where it is told to; none shows or keeps one.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from ..errors import BadValue
from ..trace import AXES, Trace
from .sheet import Sheet, number, sheets, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.patches import PathPatch

RAW, SCALED = "#c1432e", "#2b6cb0"
ANNOTATED = 12  # rows and columns up to which every cell carries its number
LABELLED = 40  # positions up to which every one has its label
HATCHED = 64  # blocked rows and columns up to which hatches are still seen as such
FORMATS = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


class Scaling(Protocol):
    """What `scaling` draws: softmax over random scores, by head size, with and without 1/√d."""

    @property
    def sizes(self) -> list[int]: ...
    @property
    def variance_raw(self) -> list[float]: ...
    @property
    def variance_scaled(self) -> list[float]: ...
    @property
    def gradient_raw(self) -> list[float]: ...
    @property
    def gradient_scaled(self) -> list[float]: ...
    @property
    def entropy_raw(self) -> list[float]: ...
    @property
    def entropy_scaled(self) -> list[float]: ...
    @property
    def size(self) -> int: ...
    @property
    def weights_raw(self) -> Tensor: ...
    @property
    def weights_scaled(self) -> Tensor: ...


def heatmap(trace: Trace, step: str = "weights", head: int = 0, ax: "Axes | None" = None) -> "Axes":
    """One head of one step: tokens beside and above, numbers in the cells where they fit.

    What the mask blocks is grey and hatched. Raises `BadValue` for a step or a head that is not
    there, or a step without numbers.
    """
    sheet = _sheet(trace, step, head)
    if ax is None:
        ax = _figure(*_size(sheet)).add_subplot()
    _draw(ax, sheet)
    ax.set_title(_title(trace, step, sheet), parse_math=False)
    return ax


def heads(trace: Trace, step: str = "weights") -> "Figure":
    """Every head of a step in one figure, all in one range of colour, with one scale."""
    _sheet(trace, step, 0)
    found = sheets(trace, trace.step(step))
    across = min(len(found), 4)
    down = -(-len(found) // across)
    beside, height = _size(found[0], most=4.0)
    width, _ = _size(found[0], most=4.0, rows=False)
    figure = _figure(beside + width * (across - 1) + 0.8, height * down + 0.4)
    axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
    low, high = span(found)
    for i, (ax, sheet) in enumerate(zip(axes, found, strict=False)):
        image = _draw(ax, sheet, low, high, rows=i % across == 0)
        ax.set_title(sheet.title or step)
    for ax in axes[len(found) :]:
        ax.remove()
    figure.colorbar(image, ax=axes[: len(found)], shrink=0.8)
    figure.suptitle(_title(trace, step), parse_math=False)
    return figure


def steps(trace: Trace, head: int = 0) -> "Figure":
    """The chain of one head, from the scores to the output, side by side."""
    names = trace.names
    trace.step("scores"), trace.step("output")
    chain = names[names.index("scores") : names.index("output") + 1]
    found = [_sheet(trace, name, head) for name in chain]
    across = len(chain) if len(chain) <= 5 else -(-len(chain) // 2)
    down = -(-len(chain) // across)
    beside, height = _size(found[0], most=4.0)
    width, _ = _size(found[0], most=4.0, rows=False)
    figure = _figure(beside + width * (across - 1), height * down + 0.4)
    widest = found[0].values.shape[1]
    # In a lone row each matrix is as wide as its columns ask, so that all rows are level.
    ratios = (
        [min(max(sheet.values.shape[1], 2), 2 * widest) for sheet in found] if down == 1 else None
    )
    grid = figure.subplots(down, across, squeeze=False, width_ratios=ratios)
    axes = grid.ravel().tolist()
    for i, (ax, name, sheet) in enumerate(zip(axes, chain, found, strict=False)):
        _draw(ax, sheet, rows=i % across == 0)
        arrow = "→ " if i else ""
        title = drawable(f"{arrow}{name}\n{trace.step(name).formula}".rstrip())
        ax.set_title(title, fontsize=9, parse_math=False)
    for ax in axes[len(chain) :]:
        ax.remove()
    if found[0].title:
        figure.suptitle(found[0].title)
    return figure


def scaling(report: Scaling, axes: "Sequence[Axes] | None" = None) -> "Figure":
    """Why divide by √d: four pictures, each with and without it.

    The variance of the scores, what it does to one query's softmax at `report.size`, the entropy
    of the softmax, and the size of its gradient.
    """
    if axes is None:
        axes = list(_figure(10, 7).subplots(2, 2).ravel())
    if len(axes) != 4:
        raise BadValue(
            f"scaling was given {len(axes)} axes.",
            "it draws four pictures: variance, softmax, entropy and gradient.",
            "pass four axes, or none for a figure of its own.",
        )
    variance, softmax, entropy, gradient = axes
    _lines(variance, report.sizes, report.variance_raw, report.variance_scaled)
    variance.set(title="variance of the scores: grows like d", yscale="log")
    _bars(softmax, report.weights_raw, report.weights_scaled)
    softmax.set(title=f"one query's weights at d = {report.size}, sorted")
    _lines(entropy, report.sizes, report.entropy_raw, report.entropy_scaled)
    entropy.set(title="entropy of the weights (nats)", ylim=(0, None))
    _lines(gradient, report.sizes, report.gradient_raw, report.gradient_scaled)
    gradient.set(title="size of the gradient of the weights", yscale="log")
    figure = variance.figure
    assert figure is not None
    if len(figure.axes) == 4:
        figure.suptitle("Why divide by √d")
    return figure  # type: ignore[return-value]  # axes that stand in a subfigure give that back


def save(figure: "Figure", path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix; the same figure gives the same bytes."""
    import matplotlib

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise BadValue(
            f"A figure was to be saved as {str(path)!r}.",
            "the suffix says the format, which is one of " + ", ".join(FORMATS) + ".",
            f"name it for example {path.stem + '.png'!r}.",
        )
    try:
        with matplotlib.rc_context({"svg.hashsalt": "clearhead"}):
            figure.savefig(path, dpi=150, format=suffix[1:], metadata=FORMATS[suffix])
    except (OSError, ValueError) as error:
        raise BadValue(
            f"The figure could not be written to {str(path)!r} "
            f"({getattr(error, 'strerror', None) or error}).",
            "a figure is written to a file in a folder that exists and may be written to.",
            "make the folder first, or name another file.",
        ) from error
    return path


def drawable(text: str) -> str:
    """`text` with what the font cannot draw written out, as ``⟨4F60⟩`` for its code point."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    left, right = "⟨⟩" if font.get_char_index(ord("⟨")) else "<>"
    return "".join(
        char if char == "\n" or font.get_char_index(ord(char)) else f"{left}{ord(char):04X}{right}"
        for char in text
    )


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadValue(
            "A figure was asked for, and matplotlib is not installed.",
            "figures are drawn with matplotlib, which clearhead does not require.",
            "pip install clearhead[plot]",
        ) from error
    # Matrices keep square cells, and this layout packs what keeps its own shape.
    figure = Figure(figsize=(width, height), layout="compressed")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    return figure


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


def _size(sheet: Sheet, most: float = 7.0, rows: bool = True) -> tuple[float, float]:
    """Inches: half of one for each cell up to `most`, and the labels and the title around them."""
    down, across = sheet.values.shape
    beside = max((len(drawable(token)) for token in sheet.rows or [""]), default=0) * rows
    labels = [drawable(token) for token in sheet.columns or []]
    above = max(map(len, labels)) if _turned(labels, across) else 0
    return (
        0.6 + 0.1 * beside + min(max(0.5 * across, 1.5), most) + 0.04 * above,
        1.3 + 0.08 * above + min(max(0.5 * down, 0.8), most),
    )


def _draw(
    ax: "Axes",
    sheet: Sheet,
    low: float | None = None,
    high: float | None = None,
    rows: bool = True,
) -> "AxesImage":
    """The matrix of a sheet on `ax`; `rows` says whether its tokens are written beside it."""
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
    _label_columns(ax, sheet)
    if rows:
        _label_rows(ax, sheet)
    else:
        ax.set_yticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


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


def _label_columns(ax: "Axes", sheet: Sheet) -> None:
    places, labels = _ticks(sheet.columns, sheet.values.shape[1])
    ax.set_xticks(places, labels=labels, parse_math=False)
    ax.set_xlabel(AXES.get(sheet.across, sheet.across))
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("bottom")
    if _turned(labels, sheet.values.shape[1]):
        for label in ax.get_xticklabels():
            label.set(rotation=45, ha="left", rotation_mode="anchor")


def _turned(labels: list[str], columns: int) -> bool:
    """Whether labels are too long to lie above their columns, which are narrow where many."""
    return max(map(len, labels), default=0) > (5 if columns <= ANNOTATED else 2)


def _label_rows(ax: "Axes", sheet: Sheet) -> None:
    places, labels = _ticks(sheet.rows, sheet.values.shape[0])
    ax.set_yticks(places, labels=labels, parse_math=False)
    ax.set_ylabel(AXES.get(sheet.down, sheet.down))


def _ticks(tokens: list[str] | None, size: int) -> tuple[list[int], list[str]]:
    """Tokens, or positions where there are none; every so many where there are too many."""
    places = list(range(0, size, -(-size // LABELLED)))
    return places, [drawable(tokens[i]) if tokens else str(i) for i in places]


def _lines(ax: "Axes", sizes: Sequence[int], raw: Sequence[float], scaled: Sequence[float]) -> None:
    ax.plot(sizes, raw, marker="o", color=RAW, label="q · k")
    ax.plot(sizes, scaled, marker="s", color=SCALED, label="q · k / √d")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(sizes), labels=[str(size) for size in sizes])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("head size d")
    ax.grid(alpha=0.3)
    ax.legend()


def _bars(ax: "Axes", raw: Tensor, scaled: Tensor) -> None:
    for weights, colour, label in ((raw, RAW, "q · k"), (scaled, SCALED, "q · k / √d")):
        heights = weights.detach().double().cpu().flatten().sort(descending=True).values.numpy()
        ax.bar(np.arange(len(heights)), heights, width=1.0, color=colour, alpha=0.65, label=label)
    ax.set_xlabel("key, the heaviest first")
    ax.set_ylim(0, 1)
    ax.legend()
