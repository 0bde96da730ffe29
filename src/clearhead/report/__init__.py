"""What every layer and head of a model does with a text, from one run of it.

While the model answers, statistics of each layer are gathered beside it, tile by tile: nothing of
the size Tq x Tk is formed, so a text may be as long as the model can read.

`found` is how `findings` print themselves, `label` what a head is called, `repeats` whether it
looks for copies of a token, `texts` of which text a call is, `listen` makes a layer of what was
heard, `run` runs the model, `tile` cuts exact weights out of a long text, `teller` reports on a
storyteller.
"""

from ..results.report import Head, Layer, Link
from .exact_weights import tile
from .report import Report
from .run import report, write
from .storyteller import report_teller

__all__ = [
    "Head",
    "Layer",
    "Link",
    "Report",
    "report",
    "report_teller",
    "tile",
    "write",
]
