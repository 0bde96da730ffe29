"""How results are shown: `text` in a terminal, `plot` by matplotlib, `html` as a page."""

from . import html, plot, text

__all__ = [
    "html",
    "plot",
    "text",
]
