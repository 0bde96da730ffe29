"""Figures of a report on a model: entropy by layer, received weight by token, every head's map."""

from typing import TYPE_CHECKING, overload

import numpy as np

from ...errors import BadValue
from ...results.report import Findings
from ..escape import visible
from .canvas import LABELLED, drawable, in_lines, new_figure, require_matplotlib, room_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK, POINT = "#14637f", "#14637f40"


def entropy_by_layer(report: Findings, ax: "Axes | None" = None) -> "Axes":
    """The mean entropy of every head, a dot each, by layer; a line through the means.

    The dashed line is the most that the mask allows: entropy of even weights.
    """
    require_matplotlib()
    if ax is None:
        ax = new_figure(max(4.8, min(10.0, 1.5 + 0.5 * len(report.layers))), 3.4).add_subplot()
    numbers = range(len(report.layers))
    means = []
    for i, layer in enumerate(report.layers):
        entropies = [head.entropy for head in layer.heads]
        ax.plot([i] * len(entropies), entropies, "o", color=POINT, markersize=6, mew=0,
                clip_on=False, label=None if i else "a head")  # fmt: skip
        means.append(float(np.mean(entropies)) if entropies else 0.0)
    ax.plot(numbers, means, "-s", color=INK, markersize=5, label="mean of the layer")
    ax.plot(numbers, [layer.most for layer in report.layers], "--", color="0.45",
            label="even weights")  # fmt: skip
    ax.set(xlabel="layer", ylabel="entropy of the weights (nats)")
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])  # room for the legend
    ax.set_xticks(list(numbers)[:: max(1, len(means) // 24)])
    ax.set_title(drawable(visible(report.name, 40)), parse_math=False)
    ax.grid(axis="y", alpha=0.3)
    ax.legend(loc="upper center", ncols=3, frameon=False, fontsize="small", handlelength=1.5)
    return ax


def received(report: Findings, layer: int, head: int, ax: "Axes | None" = None) -> "Axes":
    """How much weight each token receives from all queries of one head.

    1 is what every token would get if all got the same. Raises `BadValue` for a head that is not
    there.
    """
    require_matplotlib()
    heads = len(report.layers[layer].heads) if 0 <= layer < len(report.layers) else 0
    if not 0 <= head < heads:
        raise BadValue(
            f"Head {head} of layer {layer} was asked for.",
            f"this report has {len(report.layers)} layers"
            + (f", and layer {layer} has {heads} heads, numbered from 0." if heads else "."),
            "ask for one of these.",
        )
    weights = report.layers[layer].received[head].double().cpu().numpy()
    count = len(weights)
    if ax is None:
        ax = new_figure(max(4.0, min(12.0, 1.5 + 0.3 * count)), 3.4).add_subplot()
    if count <= 4 * LABELLED:
        ax.bar(range(count), weights, color=INK, width=0.8)
    else:  # bars thinner than a line: one filled curve, which stays small as a vector
        ax.fill_between(range(count), weights, step="mid", color=INK, linewidth=0)
    tokens = report.layers[layer].key_tokens or [str(i) for i in range(count)]
    places = list(range(0, count, -(-count // LABELLED)))
    labels = [drawable(visible(tokens[i])) for i in places]
    ax.set_xticks(places, labels=labels, parse_math=False, rotation=90, fontsize=8)
    ax.axhline(1.0, color="0.45", linestyle="--", linewidth=1)
    ax.set(xlabel="key", ylabel="received weight", xlim=(-0.7, count - 0.3), ylim=(0, None))
    label = report.layers[layer].heads[head].label
    ax.set_title(f"layer {layer}, head {head}: {drawable(label)}", parse_math=False)
    return ax


@overload
def model(report: Findings, figure: "Figure | None" = ...) -> "Figure": ...
@overload
def model(report: Findings, *, ax: "Axes") -> "Axes": ...
def model(
    report: Findings, figure: "Figure | SubFigure | None" = None, *, ax: "Axes | None" = None
) -> "Figure | SubFigure | Axes":
    """Every head's map in one figure: a row a layer, a column a head, one range of colour a layer.

    The square root of the weight is drawn, so that faint weights are seen. Returns the figure; with
    `ax`, whose place it takes, that.
    """
    require_matplotlib()
    across, down = max(len(layer.heads) for layer in report.layers), len(report.layers)
    figure = room_for(figure, ax, 0.72 * across + 0.5, 0.88 * down + 0.4)
    grid = figure.subplots(down, across, squeeze=False)
    for i, layer in enumerate(report.layers):
        maps = layer.map.clamp(min=0).sqrt().double().cpu().numpy()
        seen = layer.seen.cpu().numpy()
        hidden = np.ma.array(np.ones(seen.shape), mask=seen)
        for h, place in enumerate(grid[i]):
            place.set(xticks=[], yticks=[])
            place.spines[:].set_visible(False)
            if h >= len(layer.heads):
                continue
            place.imshow(maps[h], vmin=0, vmax=maps.max(), cmap="viridis",
                         interpolation="antialiased")  # fmt: skip
            place.set_title(
                f"{h} {drawable(layer.heads[h].label.split(' (')[0])}", fontsize=5, pad=2
            )
            if hidden.any():
                place.imshow(hidden, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        grid[i][0].set_ylabel(f"layer {i}", fontsize=7)
    how = (
        "queries down, keys across; bright where a query looks (brightest is the largest weight of "
        "the layer), white where none may"
    )
    figure.suptitle(in_lines(how, figure, 7), fontsize=7)
    return ax or figure
