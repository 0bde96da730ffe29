"""The storyteller: a small trained language model, and everything that made it.

A grammar writes small stories, and knows the subject of each verb and the antecedent of each
pronoun (`grammar`); a decoder of `clearhead.nn` learns to predict their next word (`train`); its
heads are measured against what the grammar knows (`measure`, `ablate`). `load()` returns the model
that comes with clearhead.
"""

from .ablate import Ablation, ablate
from .causes import causes
from .grammar import Story, story
from .measure import Table, measure
from .model import Config, Decoder
from .storyteller import (
    MeasuredHead,
    Reading,
    Storyteller,
    WordLink,
    is_storyteller,
    keep_table,
    load,
)
from .train import train
from .vocabulary import Vocabulary

__all__ = [
    "Ablation",
    "Config",
    "Decoder",
    "MeasuredHead",
    "Reading",
    "Story",
    "Storyteller",
    "Table",
    "Vocabulary",
    "WordLink",
    "ablate",
    "causes",
    "is_storyteller",
    "keep_table",
    "load",
    "measure",
    "story",
    "train",
]
