"""Views of attention: in a terminal (`text`), as figures (`plot`), as a page (`html`), in a
notebook (`explore`), on a local server (`clearhead serve`). `write` writes a report to files.
"""

from . import html, plot, text
from .notebook import explore
from .report_files import write

__all__ = ["explore", "html", "plot", "text", "write"]


def __getattr__(name: str) -> object:
    if name == "report_teller":
        raise ImportError(  # "from ... import" would hide the text of an AttributeError
            "clearhead.views.report_teller was removed: call clearhead.report with the "
            "storyteller, as in clearhead.report(clearhead.demo.load(), text)."
        )
    raise AttributeError(f"module 'clearhead.views' has no attribute {name!r}")
