"""The explorer in a notebook: `explore` shows it, and Python reads and sets what is chosen."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import Missing, how_to_install
from ...inspection.text_model import TextModel
from ...trace import Trace

if TYPE_CHECKING:
    from .widget import Explorer

__all__ = ["explore"]


def explore(
    model: str | Path | TextModel | Trace | None = None, text: str | None = None
) -> "Explorer":
    """A widget that shows every head of a model on a text, or the steps of a trace.

    >>> from clearhead.explorer import explore
    >>> shown = explore(None, "Once upon a time a queen slept. She dreamt.")
    >>> shown.head = 0, 7  # what is chosen, in the cell and here
    >>> shown.query = 8
    >>> shown.observe(print, ["head", "query"])  # called when somebody clicks

    In the cell another text can be typed and attention changed; this process computes it.

    Args:
        model: a folder or file, as for `clearhead look`, a `Checkpoint`, a `Storyteller`, or a
            `Trace`. None means the storyteller that comes with clearhead.
        text: what the model reads first; None for a trace, which has its own.

    Raises:
        Missing: anywidget is not installed.
        BadValue, BadType: a model that cannot be loaded; a text that it cannot read; a text beside
            a trace, or none beside a model.
    """
    try:
        from .widget import Explorer
    except ImportError as error:
        raise Missing(
            f"{error.name} is not installed.",
            "the explorer in a notebook is an anywidget, which clearhead does not require.",
            how_to_install("notebook"),
        ) from error
    return Explorer(model, text)
