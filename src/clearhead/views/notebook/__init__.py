"""The explorer in a notebook: `explore` shows it, and Python reads and sets the selection."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import needs
from ...core.functional.trace import Trace
from ...models.report.text_model import TextModel

if TYPE_CHECKING:
    from .widget import Explorer

__all__ = ["explore"]


def explore(
    model: str | Path | TextModel | Trace | None = None, text: str | None = None
) -> "Explorer":
    """Show every head of a model on a text, or the steps of a trace, as a widget.

    >>> from clearhead.views import explore
    >>> explorer = explore(None, "Once upon a time a queen slept. She dreamt.")
    >>> explorer.head = 0, 7  # selects a head, in the cell too
    >>> explorer.query = 8
    >>> explorer.observe(print, ["head", "query"])  # called after each click

    In the cell, a user can type another text and edit attention; this process computes the result.

    Args:
        model: a folder or file, as for `clearhead look`, a `Checkpoint`, a `Storyteller`, or a
            `Trace`. None means the included storyteller.
        text: the first text; None for a trace, which has a text.

    Raises:
        Missing: anywidget is not installed.
        BadValue, BadType: a model that cannot be loaded; a text that it cannot read; a trace with a
            text, or a model without one.
    """
    with needs("notebook", "the explorer in a notebook needs anywidget."):
        from .widget import Explorer
    return Explorer(model, text)
