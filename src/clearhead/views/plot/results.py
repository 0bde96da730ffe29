"""Draw results: effects of edits, parts of logits and scores, numbers of a training, caches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import BadValue, as_index, did_you_mean
from ...core.formatting import evenly, visible
from ...models.effects.compare_caches import CacheDamage
from ...models.effects.effect_table import Effects
from ...models.monitor.history import History
from ...models.weights.logit_parts import LogitAttribution
from ...models.why import Why
from .canvas import ACCENT, drawable, must_draw, new_figure, signed_ink, weight_ink, wrap_title

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
        rule = "it shows effects of heads or positions by layer, and estimates over exact effects."
        hint = "print them: print(effects.table())."
        raise BadValue(f"These {len(results)} effects cannot be drawn.", rule, hint)
    if tokens is not None and results.axes[1:] == ("position",) and len(tokens) < grid.shape[1]:
        rule = f"there is one for each of {grid.shape[1]} positions."
        hint = "pass the tokens of the text, or None for numbers."
        raise BadValue(f"effects got {len(tokens)} tokens.", rule, hint)
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


def attribution(parts: LogitAttribution, position: int = -1) -> "Figure":
    """Draw the parts of the logit at one position: a cell for each head, a bar for each MLP.

    Blue heads raise the logit, brown ones lower it. The title has the other parts and the logit,
    which is the sum of all. Raises `BadValue` for a position that does not exist.
    """
    must_draw("attribution", parts, LogitAttribution, "logit_attribution(...)")
    L, H, T = parts.heads.shape
    rule = f"it is a number from 0 to {T - 1}."
    at = as_index("Position", position, T, rule, "pass one of these.")
    heads, mlps = (x[..., at].float().cpu().numpy() for x in (parts.heads, parts.mlps))
    figure = new_figure(max(6.0, 0.3 * (H + 8)), max(2.6, 0.2 * (L + 6)))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    ink, scale = signed_ink(float(np.nanmax(np.abs(heads))) or 1.0)
    image = left.imshow(heads, cmap=ink, norm=scale, aspect="auto")
    left.set_xticks(range(H)[:: max(1, H // 16)])
    left.set_yticks(range(L)[:: max(1, L // 16)])
    left.set(xlabel="head", ylabel="layer")
    figure.colorbar(image, ax=left, label="part of the logit")
    right.bar_label(right.barh(range(L), mlps, color=ACCENT), fmt="%.2f", fontsize=6, padding=2)
    right.margins(x=0.2)  # room for the labels
    right.axvline(0, color="0.6", linewidth=1)
    right.set_xlabel("part of the MLP")
    named = {"logit": parts.logit, "embedding": parts.embedding, "biases": parts.bias}
    title = ", ".join(f"{name} {float(x[at]):.2f}" for name, x in named.items())
    figure.suptitle(f"position {at}: {title}", fontsize="medium")
    return figure


DRAWN = 8  # parts of a side that have a bar


def why(reasons: Why) -> "Figure":
    """Draw the parts of a contrast as bars: on the left what wrote the key, on the right the query.

    The eight largest parts of each side have a bar, and the sum of all others has the last one, so
    the bars of a side sum to the contrast. The title is the sentence. Raises `Missing` without
    matplotlib, and `BadType` for anything but a `Why`.
    """
    must_draw("why", reasons, Why, "why(...)")
    others = len(reasons.components) - DRAWN
    figure = new_figure(8.0, 1.4 + 0.28 * min(DRAWN + 1, len(reasons.components)))
    for ax, of in zip(figure.subplots(1, 2), ("key", "query"), strict=True):
        bars = [(drawable(str(component)), part) for component, part in reasons.largest(of, DRAWN)]
        if others > 0:
            bars.append((f"{others} others", reasons.contrast - sum(part for _, part in bars)))
        names, parts = zip(*bars, strict=True)
        ax.barh(range(len(parts)), parts, color=ACCENT, tick_label=names)
        ax.invert_yaxis()
        ax.axvline(0, color="0.6", linewidth=1)
        ax.set(xlabel="part of the contrast", title=f"what wrote the {of}")
    figure.suptitle(wrap_title(drawable(reasons.sentence()), figure, points=10), fontsize="medium")
    return figure


_NAMED = 5  # heads whose lines have a colour and a name


def training(history: History, metric: str = "max") -> "Figure":
    """Draw a metric of each head over the steps: lines above, and a row of a heat map for each.

    The heads that changed most have coloured lines with names. Steps at which an alarm begins have
    a tick at the top. Raises `BadValue` for a metric that was not logged.
    """
    must_draw("training", history, History, "ch.monitor.read(folder)")
    if metric not in history.values:
        logged = list(history.values)
        rule = f"the run logged {', '.join(logged)}."
        hint = did_you_mean(metric, logged) or "pass one of these."
        raise BadValue(f"metric is {metric!r}.", rule, hint)
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
    heads = np.arange(len(names))
    image = below.pcolormesh(steps, heads, values.T, cmap="viridis", shading="nearest")
    below.invert_yaxis()
    ticks = evenly(len(names), 24)
    below.set_yticks(ticks, [names[i] for i in ticks], fontsize="small")
    below.set(xlabel="step", ylabel="head")
    figure.colorbar(image, ax=below, label=metric)
    return figure


def caches(damage: CacheDamage, by: str | None = None) -> "Figure":
    """Draw one measure of each cache by layer and head, in one colour scale for all.

    `by` is a measure as in `CacheDamage.grid`; None means "kl", or "reverse_kl" if a cache drops
    keys. Layers that a cache does not change are grey, and so is an infinite divergence. Raises
    `BadValue` for an unknown measure.
    """
    must_draw("caches", damage, CacheDamage, "compare_caches(...)")
    by = by or ("kl" if damage.all_kept else "reverse_kl")
    grids = {name: damage.grid(name, by).numpy() for name in damage.bits}
    finite = [x[np.isfinite(x)] for x in grids.values()]
    ink, scale = weight_ink(high=max((float(x.max()) for x in finite if x.size), default=1.0))
    rows, columns = next(iter(grids.values())).shape
    figure = new_figure(1.2 + len(grids) * (0.9 + 0.13 * columns), 1.4 + 0.13 * max(rows, 12))
    axes = figure.subplots(1, len(grids), squeeze=False, sharey=True)[0]
    for ax, (name, grid) in zip(axes, grids.items(), strict=True):
        cells = np.ma.masked_invalid(grid)
        image = ax.imshow(cells, cmap=ink, norm=scale, aspect="auto", interpolation="nearest")
        ax.set_title(drawable(name), fontsize="medium", parse_math=False)
        ax.set(xlabel="head", xticks=evenly(columns, 16))
    axes[0].set(ylabel="layer", yticks=evenly(rows, 16))
    label = {"kl": "KL(w || w')", "reverse_kl": "KL(w' || w)"}.get(by, by)
    figure.colorbar(image, ax=list(axes), label=f"{label}, nats" if by.endswith("kl") else label)
    return figure
