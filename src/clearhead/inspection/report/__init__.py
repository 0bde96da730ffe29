"""What every layer and head of a model does with a text, from one run of the model.

While the model computes, statistics of each attention call are streamed, so nothing of the size
Tq x Tk is formed, and a text may be as long as the model can read.
"""

from .exact_weights import tile
from .findings import Head, Layer, Link
from .result import Report
from .run import report

__all__ = [
    "Head",
    "Layer",
    "Link",
    "Report",
    "report",
    "tile",
]
