"""Draw figures of a report: entropy by layer, the map of one head and of all, an image."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from ...core.errors import BadValue, as_index
from ...core.formatting import visible
from ...models.report import Report
from ...models.report.opening import token_labels
from ..panels import Panel
from . import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

MOST_NAME = 200  # characters of the name of a model
BLOCKED = (0.88, 0.88, 0.88, 1.0)  # grey
TITLE = 0.18  # of the height of a map and its title
POINT = f"{canvas.ACCENT}40"  # transparent, so that overlapping dots are visible


def entropy_by_layer(report: Report, ax: "Axes | None" = None) -> "Axes":
    """Draw the mean entropy of every head as a dot, by layer, and a line through the means.

    The dashed line is the entropy of uniform weights, the largest that the mask allows. Raises
    `Missing` without matplotlib, and `BadType` unless `report` is a `Report`.
    """
    canvas.must_draw("entropy_by_layer", report, Report, "report(...)")
    if ax is None:
        ax = canvas.new_figure(
            max(4.8, min(10.0, 1.5 + 0.5 * len(report.layers))), 3.4
        ).add_subplot()
    numbers = range(len(report.layers))
    means = []
    for i, layer in enumerate(report.layers):
        entropies = [head.entropy for head in layer.heads]
        ax.plot([i] * len(entropies), entropies, "o", color=POINT, markersize=6, mew=0,
                clip_on=False, label=None if i else "a head")  # fmt: skip
        means.append(float(np.mean(entropies)) if entropies else 0.0)
    ax.plot(numbers, means, "-s", color=canvas.ACCENT, markersize=5, label="mean of the layer")
    ax.plot(numbers, [layer.max_entropy for layer in report.layers], "--", color="0.45",
            label="even weights")  # fmt: skip
    ax.set(xlabel="layer", ylabel="entropy of the weights (nats)")
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])  # room for the legend
    ax.set_xticks(list(numbers)[:: max(1, len(means) // 24)])
    title = canvas.drawable(visible(report.name, MOST_NAME))
    ax.set_title(canvas.wrap_title(title, ax.figure, margin=1.0), parse_math=False)
    ax.grid(axis="y", alpha=0.3)
    ax.legend(loc="upper center", ncols=3, frameon=False, fontsize="small", handlelength=1.5)
    return ax


def head(report: Report, layer: int, head: int, ax: "Axes | None" = None) -> "Axes":
    """Draw the attention map of one head: queries down, keys across, with their tokens.

    The scale of weights is their square root, from 0 to 1, as on the page. In a text of more than
    256 tokens a cell is the mean weight of a part, named by its first token; beside more than 600
    tokens of an image it is that of a block of patches. Raises `BadValue` for a head that does not
    exist.
    """
    canvas.must_draw("head", report, Report, "report(...)")
    label, own = report[layer, head].label, report.layers[layer]
    weights = own.pooled[head].clamp(min=0).double().cpu()
    queries, keys = (
        [canvas.drawable(visible(names[i * len(names) // count], 24)) for i in range(count)]
        for names, count in zip(_names(report, layer), weights.shape, strict=True)
    )
    panel = Panel("", "q", "k", queries, keys, weights, ~own.allowed.cpu(), is_share=True)
    side = max(4.0, min(8.0, 1.5 + 0.4 * max(weights.shape)))
    ax = canvas.new_figure(side, side).add_subplot() if ax is None else ax
    canvas.draw(ax, panel)
    ax.set(xlabel="key", ylabel="query")
    title = canvas.drawable(f"L{layer}H{head}: {label}\n{visible(report.name, MOST_NAME)}")
    ax.set_title(canvas.wrap_title(title, ax.figure, margin=0.6), parse_math=False)
    return ax


def image(
    report: Report,
    layer: int,
    head: int | None,
    query: int | None = None,
    ax: "Axes | None" = None,
    *,
    registers: bool = True,
) -> "Axes":
    """Draw the weights of a query on the patches of an image, above this image in grey.

    `query` is a token, framed if it is a patch; None is the mean over queries, and None for `head`
    that over heads. The scale is their
    square root, from 0 to the largest on a patch. Beyond 600 tokens, patches of a block share
    their weight, and a query is a block. Patches that are registers in all but name
    (`Report.registers_of`) have a dashed frame; ``registers=False`` leaves them out of the map and
    of the scale, and states their weight. Raises the errors of `Report.weights_on_image`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Rectangle

    canvas.must_draw("image", report, Report, "report(...)")
    maps, own = report.weights_on_image(layer, head), report.layers[layer]
    picture = own.picture
    assert picture is not None and own.block is not None
    T, columns = own.queries, picture.columns
    before = f"{len(picture.before)} before {picture.rows} x {columns} patches"
    rule = f"a query is one of {T} tokens, {before}."
    at = None if query is None else as_index("Query", query, T, rule, "pass for example query=0.")
    weights = (maps.mean(0) if at is None else maps[at]).double().cpu().numpy()
    cells = picture.cells(own.block)
    on_grid = cells[picture.patches].view(picture.rows, columns).numpy()
    at_registers = [int(cells[x.token]) for x in report.registers_of(own)]
    is_left_out = np.isin(on_grid, [] if registers else at_registers)
    on_them = 100 * float(weights[is_left_out].sum())
    weights[is_left_out] = 0.0
    ax = canvas.new_figure(4.6, 4.6 * picture.rows / columns).add_subplot() if ax is None else ax
    extent = -0.5, columns - 0.5, picture.rows - 0.5, -0.5
    ax.imshow(picture.pixels.cpu().numpy().mean(-1), cmap="gray", vmin=-200, extent=extent)
    top = float(weights.max()) or 1.0
    ink, scale = canvas.weight_ink(0.0, top)
    strength = 0.9 * np.sqrt(weights / top)
    drawn = ax.imshow(weights, cmap=ink, norm=scale, alpha=strength, extent=extent)
    drawn.set_interpolation("nearest")
    frames = [(cell, "0.2", "--") for cell in at_registers]
    if at is not None:
        frames.append((int(cells[at]), "orange", "-"))
    for cell, colour, dashes in frames:
        if len(places := np.argwhere(on_grid == cell)):
            (row, column), (high, wide) = places[0], places[-1] - places[0] + 1
            corner = column - 0.5, row - 0.5
            ax.add_patch(Rectangle(corner, wide, high, fill=False, ec=colour, ls=dashes, lw=2))
    ax.set(xticks=[], yticks=[])
    of = "all queries" if at is None else _names(report, layer)[0][int(cells[at])]
    colours = ax.figure.colorbar(ScalarMappable(scale, ink), ax=ax, shrink=0.8)
    ticks = [0.0, top / 4, top]
    colours.set_ticks(ticks, labels=[f"{100 * x:.3g} %" for x in ticks])
    without = f", without {on_them:.3g} % on registers" if is_left_out.any() else ""
    colours.set_label(f"weight of {canvas.drawable(of)}{without}")
    ax.set_title(_name(report, layer, head), parse_math=False)
    return ax


def words(
    report: Report, layer: int, head: int | None = None, queries: Sequence[int] | None = None
) -> "Figure":
    """Draw an `image` for each word of a vision-language model, with its weights on the patches.

    `queries` are tokens; None means those after the image. None for `head` is the mean over heads.
    Each map has its own scale. Above it are the word and the fraction of its weight that is on the
    image. Raises the errors of `image`, and `BadValue` without a query.
    """
    canvas.must_draw("words", report, Report, "report(...)")
    weights, own = report.weights_on_image(layer, head), report.layers[layer]
    after = 0 if own.picture is None else len(own.picture.after)
    at = range(own.queries - after, own.queries) if queries is None else queries
    if not len(at):
        rule = "words are tokens after the image; None means all of them."
        raise BadValue("words got no query.", rule, "pass words after the image to the model, too.")
    across, down = min(len(at), 4), -(-len(at) // 4)
    high = 2.4 * weights.shape[1] / weights.shape[2] + 0.5
    figure = canvas.new_figure(3.2 * across, high * down + 0.6)
    grid = figure.subplots(down, across, squeeze=False).flat
    for query, ax in zip(at, grid, strict=False):
        image(report, layer, head, query, ax)
        word = canvas.drawable(visible(token_labels(report, layer)[0][query], 20))
        on_image = f"{100 * float(weights[query].sum()):.3g} % on the image"
        ax.set_title(f"{word}: {on_image}", fontsize=9, parse_math=False)
    for ax in list(grid):
        ax.remove()
    figure.suptitle(_name(report, layer, head), parse_math=False)
    return figure


def _names(report: Report, layer: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return the labels of queries and keys, or of the cells of a map with an image."""
    own, labels = report.layers[layer], token_labels(report, layer)
    if own.picture is None or own.block is None:
        return labels
    queries, keys = (own.picture.cell_names(tokens, own.block) for tokens in labels)
    return queries, keys


def _name(report: Report, layer: int, head: int | None) -> str:
    if head is None:
        return f"L{layer}, mean of {len(report.layers[layer].heads)} heads"
    return f"L{layer}H{head}: {canvas.drawable(report[layer, head].label)}"


@overload
def model(report: Report, figure: "Figure | None" = ...) -> "Figure": ...
@overload
def model(report: Report, *, ax: "Axes") -> "Axes": ...
def model(
    report: Report, figure: "Figure | SubFigure | None" = None, *, ax: "Axes | None" = None
) -> "Figure | SubFigure | Axes":
    """Draw every head's map in one figure: a row per layer, a column per head.

    The scale of weights is their square root, from 0 to 1, as on the page. Returns the figure, or
    `ax` if passed, which the drawing replaces. Raises the errors of `entropy_by_layer`.
    """
    canvas.must_draw("model", report, Report, "report(...)")
    across, down = max(len(layer.heads) for layer in report.layers), len(report.layers)
    figure = canvas.figure_for(figure, ax, 0.72 * across + 0.5, 0.88 * down + 0.4)
    # One image a layer, as some hundred subplots take a minute to lay out.
    grid = figure.add_subplot()
    ink, scale = canvas.weight_ink()
    for i, layer in enumerate(report.layers):
        maps = ink(scale(layer.pooled.clamp(min=0).double().cpu().numpy()))
        maps[:, ~layer.allowed.cpu().numpy()] = BLOCKED
        gap = -(-maps.shape[2] // 12)
        maps = np.pad(maps, ((0, 0), (0, 0), (0, gap), (0, 0)))  # transparent
        extent = (0, len(maps), i + 1, i + TITLE)
        grid.imshow(np.concatenate([*maps], 1), extent=extent, aspect="auto")
        for h, head in enumerate(layer.heads):
            label = canvas.drawable(f"{h} {head.label.split(' (')[0]}")
            grid.text(h, i + TITLE - 0.03, label, fontsize=5, parse_math=False, clip_on=True)
    grid.set(xlim=(0, across), ylim=(down, 0), xticks=[])
    middles = [i + (1 + TITLE) / 2 for i in range(down)]
    grid.set_yticks(
        middles, [f"layer {i}" for i in range(down)], fontsize=7, rotation=90, va="center"
    )
    grid.tick_params(length=0)
    grid.spines[:].set_visible(False)
    legend = canvas.drawable(visible(report.name, MOST_NAME)) + (
        "\nqueries down, keys across; dark: large weights (the square root, from 0 to 1), grey: "
        "masked"
    )
    figure.suptitle(canvas.wrap_title(legend, figure, 7), fontsize=7, parse_math=False)
    return ax or figure
