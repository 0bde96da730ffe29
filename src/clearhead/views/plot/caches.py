"""Draw what caches do to each head of a model."""

from typing import TYPE_CHECKING

import numpy as np

from ...core.formatting import evenly
from ...models.effects.caches import CacheDamage
from .canvas import drawable, must_draw, new_figure
from .ink import weight_ink

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = 16  # most layers, and most heads, that have their number


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
        ax.set(xlabel="head", xticks=evenly(columns, _LABELS))
    axes[0].set(ylabel="layer", yticks=evenly(rows, _LABELS))
    label = {"kl": "KL(w || w')", "reverse_kl": "KL(w' || w)"}.get(by, by)
    figure.colorbar(image, ax=list(axes), label=f"{label}, nats" if by.endswith("kl") else label)
    return figure
