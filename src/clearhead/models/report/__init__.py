"""Report what every layer and head of a model does with a text, from one run of the model.

Statistics of each attention call are computed tile by tile, so no Tq x Tk matrix is formed, and a
text may be as long as the model's context.
"""

from .batch import report_batch
from .exact_weights import tile
from .findings import Head, Layer, Link, NextToken, Register, Role, Writer
from .report_weights import report_weights
from .result import Report
from .run import report
from .summary import summary
from .word_times import Word, WordTimes, word_times

__all__ = [
    "Head", "Layer", "Link", "NextToken", "Register", "Report", "Role", "Word", "WordTimes",
    "Writer", "report", "report_batch", "report_weights", "summary", "tile", "word_times",
]  # fmt: skip
