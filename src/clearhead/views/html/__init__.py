"""One self-contained HTML page: of a trace, every step; of a report, the ladder down to it.

A page asks the network for nothing. Its policy lets run only the script and the style written in
it, by their hashes, so the same trace gives the same bytes. Tokens, titles and notes are
strangers' text: they reach the page as escaped text or as JSON that cannot close its element, and
never as markup.
"""

from .document import in_notebook
from .report import report_page, write_report
from .steps import notebook, page, write_page

__all__ = [
    "in_notebook",
    "notebook",
    "page",
    "report_page",
    "write_page",
    "write_report",
]
