"""Draw two figures: the loss by step, and the results of the ablation.

matplotlib is optional: without it, training and ablation draw nothing.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from clearhead.views import plot


def draw_losses(
    curves: Mapping[str, Sequence[float]], path: str | Path, held_out: float | None = None
) -> Path | None:
    """Draw the finite losses by step, one line per name. Return None without matplotlib."""
    if not plot.can_draw():
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    for name, losses in curves.items():
        ax.plot(range(1, len(losses) + 1), losses, linewidth=1, label=name)
    drawn = [loss for losses in curves.values() for loss in losses]
    if held_out is not None and math.isfinite(held_out):
        drawn.append(held_out)
        ax.axhline(held_out, color="0.4", linestyle="--", label=f"held out, {held_out:.3f}")
    ax.set_xlabel("step")
    ax.set_ylabel("loss (nats per word)")
    ax.set_ylim(0, 1.05 * max(filter(math.isfinite, drawn), default=1.0))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return plot.save(figure, path)


def draw_ablation(
    names: Sequence[str],
    losses: Sequence[float],
    rates: Mapping[str, Sequence[float]],
    path: str | Path,
) -> Path | None:
    """Draw bars of the loss and of each rate, one for each name. Return None without matplotlib."""
    if not plot.can_draw():
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    rows = range(len(names))
    left.barh(rows, losses, color="0.55")
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xlabel("held-out loss, future hidden")
    height = 0.8 / len(rates)
    for i, (label, values) in enumerate(rates.items()):
        right.barh([row + (i - 1) * height for row in rows], values, height, label=label)
    right.set_yticks(rows, [""] * len(names))
    right.invert_yaxis()
    right.set_xlim(0, 1)
    right.set_xlabel("fraction of held-out words from which the best head looks there")
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(rates))
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return plot.save(figure, path)
