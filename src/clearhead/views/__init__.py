"""Views of attention: in a terminal (`text`), as figures (`plot`), as a page (`html`), in a
notebook (`explore`), on a local server (`clearhead serve`). `write` writes a report to files.
"""

from . import html, plot, text
from .notebook import explore
from .report_files import write

__all__ = ["explore", "html", "plot", "text", "write"]
