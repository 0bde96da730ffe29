"""What people look at: in a terminal (`text`), as figures (`plot`), as a page (`html`), in a
notebook (`explore`), on a local server (`clearhead serve`); `write` puts a report into files.
"""

from . import html, plot, text
from .notebook import explore
from .report_files import write
from .storyteller_report import report_teller

__all__ = [
    "explore",
    "html",
    "plot",
    "report_teller",
    "text",
    "write",
]
