"""The storyteller: a small model that learned to attend, and all that made it.

Small stories know which word means which (`grammar`), a decoder of `clearhead.nn` learns to guess
their next word (`train`), and its heads are measured against the truth (`measure`, `ablate`).
`load()` is the one that comes with clearhead.
"""

from .ablate import Ablation as Ablation, ablate as ablate
from .grammar import Story as Story, story as story
from .measure import Table as Table, measure as measure
from .model import Config as Config, Decoder as Decoder
from .reader import (
    Head as Head,
    Link as Link,
    Reading as Reading,
    Storyteller as Storyteller,
    is_storyteller as is_storyteller,
    keep_table as keep_table,
    load as load,
)
from .train import train as train
from .vocabulary import Vocabulary as Vocabulary
