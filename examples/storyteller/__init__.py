"""Make the included model: generate stories, train a decoder, and measure its heads.

`grammar` generates short stories with the subject of each verb and the antecedent of each pronoun.
`train` trains a decoder of `clearhead.nn` to predict their next word. `measure`, `ablate` and
`causes` compare its heads with these subjects and antecedents.
"""

from .ablate import Ablation, ablate
from .causes import causes
from .grammar import Story, story
from .measure import Table, measure
from .train import train

__all__ = ["Ablation", "Story", "Table", "ablate", "causes", "measure", "story", "train"]
