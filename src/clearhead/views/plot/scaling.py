"""Draw why scores are divided by √d."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from torch import Tensor

from ...core.errors import BadValue
from ...core.functional.scaling import Scaling
from .canvas import figure_for, must_draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAW, SCALED = "#c1432e", "#2b6cb0"


@overload
def scaling(report: Scaling, axes: "Sequence[Axes] | None" = ...) -> "Figure": ...
@overload
def scaling(report: Scaling, *, ax: "Axes") -> "Axes": ...
def scaling(
    report: Scaling, axes: "Sequence[Axes] | None" = None, *, ax: "Axes | None" = None
) -> "Figure | Axes":
    """Draw why scores are divided by √d: four plots, each with and without the division.

    They show the variance of the scores, one query's softmax at `report.size`, the entropy of the
    softmax, and the size of its gradient. Returns the figure, or `ax` if passed, which the four
    plots replace.
    """
    must_draw("scaling", report, Scaling, "why_scale()")
    if axes is None:
        axes = list(figure_for(None, ax, 10, 7).subplots(2, 2).ravel())
    if len(axes) != 4:
        raise BadValue(
            f"scaling got {len(axes)} axes.",
            "it draws four plots: variance, softmax, entropy and gradient.",
            "pass four axes, or None for a new figure.",
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
    if ax is not None:
        return ax
    return figure  # type: ignore[return-value]  # the subfigure, if the axes are in one


def _lines(ax: "Axes", sizes: Sequence[int], raw: Sequence[float], scaled: Sequence[float]) -> None:
    ax.plot(sizes, raw, marker="o", color=RAW, label="q · k")
    ax.plot(sizes, scaled, marker="s", color=SCALED, label="q · k / √d")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(sizes), labels=[str(size) for size in sizes])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("features d")
    ax.grid(alpha=0.3)
    ax.legend()


def _bars(ax: "Axes", raw: Tensor, scaled: Tensor) -> None:
    for weights, colour, label, offset in (
        (raw, RAW, "q · k", -0.22),
        (scaled, SCALED, "q · k / √d", 0.22),
    ):
        heights = weights.detach().double().cpu().flatten().sort(descending=True).values.numpy()
        ax.bar(np.arange(len(heights)) + offset, heights, width=0.44, color=colour, label=label)
    ax.set_xlabel("key, the heaviest first")
    ax.set_ylabel("weight")
    ax.set_ylim(0, 1)
    ax.legend()
