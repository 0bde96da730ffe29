"""The storyteller: a small model that learned to attend, and all that made it.

Small stories know which word means which (`grammar`), a decoder of `clearhead.nn` learns to guess
their next word (`train`), and its heads are measured against the truth (`measure`, `ablate`).
`load()` is the one that comes with clearhead.
"""

from .ablate import Ablation, ablate
from .causes import causes
from .grammar import Story, story
from .measure import Table, measure
from .model import Config, Decoder
from .storyteller import Head, Link, Reading, Storyteller, is_storyteller, keep_table, load
from .train import train
from .vocabulary import Vocabulary

__all__ = [
    "Ablation",
    "Config",
    "Decoder",
    "Head",
    "Link",
    "Reading",
    "Story",
    "Storyteller",
    "Table",
    "Vocabulary",
    "ablate",
    "causes",
    "is_storyteller",
    "keep_table",
    "load",
    "measure",
    "story",
    "train",
]
