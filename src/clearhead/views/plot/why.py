"""Draw what wrote the query and the keys of a score."""

from typing import TYPE_CHECKING

from ...models.why import Why
from .canvas import ACCENT, drawable, must_draw, new_figure, wrap_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            rest = reasons.contrast - sum(part for _, part in bars)
            bars.append((f"{others} others", rest))
        names, parts = zip(*bars, strict=True)
        ax.barh(range(len(parts)), parts, color=ACCENT, tick_label=names)
        ax.invert_yaxis()
        ax.axvline(0, color="0.6", linewidth=1)
        ax.set(xlabel="part of the contrast", title=f"what wrote the {of}")
    title = wrap_title(drawable(reasons.sentence()), figure, points=10)
    figure.suptitle(title, fontsize="medium")
    return figure
