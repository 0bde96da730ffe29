"""Self-contained HTML pages: every step of a trace; every head of a report, a survey, a training.

A page requests nothing from the network. Its security policy allows only its own script and style,
by their hashes. The same trace gives the same bytes. Tokens, titles and notes are untrusted: they
are written as escaped text, or as JSON that cannot close its element, never as markup.
"""

from .document import in_notebook
from .report import report_page, write_report
from .steps import page, write_page
from .survey import survey_page, write_survey
from .training import training_page, write_training

__all__ = [
    "in_notebook", "page", "report_page", "survey_page", "training_page", "write_page",
    "write_report", "write_survey", "write_training",
]  # fmt: skip
