"""Draw what heads and MLPs write toward a logit."""

from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import as_index
from ...models.weights.logit_parts import LogitAttribution
from .canvas import ACCENT, must_draw, new_figure
from .ink import signed_ink

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
