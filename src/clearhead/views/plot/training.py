"""Draw the numbers of heads over the steps of a training."""

from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import BadValue, did_you_mean
from ...core.formatting import evenly
from ...models.monitor.history import History
from .canvas import ACCENT, must_draw, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 5  # heads whose lines have a colour and a name


def training(history: History, metric: str = "max") -> "Figure":
    """Draw a metric of each head over the steps: lines above, and a row of a heat map for each.

    The heads that changed most have coloured lines with names. Steps at which an alarm begins have
    a tick at the top. Raises `BadValue` for a metric that was not logged.
    """
    must_draw("training", history, History, "ch.monitor.read(folder)")
    if metric not in history.values:
        logged = list(history.values)
        raise BadValue(
            f"metric is {metric!r}.",
            f"the run logged {', '.join(logged)}.",
            did_you_mean(metric, logged) or "pass one of these.",
        )
    values, steps = history.values[metric], np.array(history.steps)
    names = [f"L{layer}H{head}" for layer, head in history.heads]
    figure = new_figure(8.0, 6.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    above.plot(steps, values, color="0.75", linewidth=0.7)
    change = np.fmax.reduce(values) - np.fmin.reduce(values)
    for head in np.argsort(-np.nan_to_num(change), kind="stable")[:_NAMED]:
        above.plot(steps, values[:, head], label=names[head])
    for alarm in history.alarms():
        above.axvline(alarm.step, ymin=0.95, color=ACCENT)
    above.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    above.set_ylabel(metric)
    edges = _edges(steps)
    rows = np.arange(len(names) + 1) - 0.5
    image = below.pcolormesh(edges, rows, values.T, cmap="viridis")
    below.invert_yaxis()
    ticks = evenly(len(names), 24)
    below.set_yticks(ticks, [names[i] for i in ticks], fontsize="small")
    below.set(xlabel="step", ylabel="head")
    figure.colorbar(image, ax=below, label=metric)
    return figure


def _edges(steps: np.ndarray) -> np.ndarray:
    """Return the edges of cells around steps, half-way between neighbours."""
    if len(steps) == 1:
        return steps[0] + np.array([-0.5, 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])
