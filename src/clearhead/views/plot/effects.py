"""Draw the effects of edits: a map of heads or positions, and estimates over exact effects."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import BadValue
from ...core.formatting import visible
from ...models.effects.effect_table import Effects
from .canvas import ACCENT, drawable, must_draw, new_figure
from .ink import signed_ink

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def effects(results: Effects, tokens: Sequence[str] | None = None) -> "Figure":
    """Draw the effect of each head, position or path, and estimates over exact effects.

    Heads (or positions) by layer, or senders of paths by receiver, are coloured by their effect:
    blue raises the metric, brown lowers it. `tokens` are the words of the text, by position. Each
    edit is a dot, on a line if estimate and exact effect agree, and hollow if the estimate is not
    to be trusted. A plot without data is left out. Raises `BadValue` if neither can be drawn, which
    is so for effects without two axes (see `Effects.axes`) that lack estimates or exact effects;
    and for too few tokens.
    """
    must_draw("effects", results, Effects, "effects(...)")
    which = "exact" if any(e.exact is not None for e in results) else "estimate"
    grid, axes_of_grid = results.grid(which).numpy(), results.axes
    names: tuple[list[str], list[str]] | None = None  # of rows and columns
    if axes_of_grid == ("layer", "head", "receiver"):
        grid, names = _senders_by_receiver(grid, results)
        axes_of_grid = "sender", "receiver"
    pairs = [(e.exact, e.estimate, e.trusted) for e in results if e.trusted is not None]
    if len(axes_of_grid) != 2:
        grid = np.zeros((0, 0))
    if not grid.size and not pairs:
        raise BadValue(
            f"These {len(results)} effects cannot be drawn.",
            "the figure shows effects of heads or positions by layer, and estimates over exact "
            "effects.",
            "print them: print(effects.table()).",
        )
    if tokens is not None and results.axes[1:] == ("position",) and len(tokens) < grid.shape[1]:
        raise BadValue(
            f"effects got {len(tokens)} tokens.",
            f"there is one for each of {grid.shape[1]} positions.",
            "pass the tokens of the text, or None for numbers.",
        )
    parts = bool(grid.size) + bool(pairs)
    figure = new_figure(4.6 * parts, 3.6)
    axes = list(figure.subplots(1, parts, squeeze=False)[0])
    if grid.size:
        ax = axes.pop(0)
        most = float(np.nanmax(np.abs(grid))) or 1.0
        ink, scale = signed_ink(most)
        image = ax.imshow(grid, cmap=ink, norm=scale, aspect="auto")
        ax.set(xlabel=axes_of_grid[1], ylabel=axes_of_grid[0])
        rows, columns = (range(n)[:: max(1, n // 16)] for n in grid.shape)
        ax.set_yticks(rows, None if names is None else [names[0][n] for n in rows])
        if names is not None:
            ax.set_xticks(columns, [names[1][n] for n in columns], rotation=90)
        elif tokens is not None and axes_of_grid[1] == "position":
            words = [drawable(visible(token, 20)) for token in tokens[: grid.shape[1]]]
            ax.set_xticks(range(len(words)), words, rotation=90)
        else:
            ax.set_xticks(columns)
        if which == "estimate":
            ax.set_title("estimates, not checked", fontsize="medium")
        figure.colorbar(image, ax=ax, label=f"change of {drawable(visible(results.metric, 30))}")
    if pairs:
        ax = axes.pop(0)
        x, y, trusted = np.array(pairs, dtype=float).T
        ends = min(x.min(), y.min()), max(x.max(), y.max())
        ax.plot(ends, ends, "--", color="0.6", linewidth=1)
        sure, dot = trusted > 0, {"color": ACCENT, "markersize": 4, "alpha": 0.7}
        ax.plot(x[sure], y[sure], "o", mew=0, **dot)
        if not sure.all():
            label = f"not to be trusted: {(~sure).sum()} of {len(sure)}"
            ax.plot(x[~sure], y[~sure], "o", mfc="none", mew=1, label=label, **dot)
            ax.legend(fontsize="small", frameon=False)
        rho = results.correlation
        ax.set(xlabel="exact effect", ylabel="estimate from gradients")
        if rho is not None:
            ax.set_title(f"rank correlation {rho:.2f}", fontsize="medium")
    return figure


def _senders_by_receiver(
    grid: "np.ndarray", results: Effects
) -> tuple["np.ndarray", tuple[list[str], list[str]]]:
    """Join the layers and heads of senders, and name senders and receivers, such as "L0H7"."""
    paths = [e for e in results if e.receiver is not None and e.position is None]
    sites = {(e.layer, e.head) for e in paths if e.layer is not None and e.head is not None}
    senders = sorted(sites)
    rows = np.stack([grid[sender] for sender in senders])
    names = ([f"L{layer}H{head}" for layer, head in ends] for ends in (senders, results.receivers))
    return rows, (next(names), next(names))
