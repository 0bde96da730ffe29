"""How the model that ships was made: a grammar, a training, and what its heads were measured to do.

A grammar writes small stories, and knows the subject of each verb and the antecedent of each
pronoun (`grammar`); a decoder of `clearhead.nn` learns to predict their next word (`train`); its
heads are measured against what the grammar knows (`measure`, `ablate`, `causes`).
"""

from .ablate import Ablation, ablate
from .causes import causes
from .grammar import Story, story
from .measure import Table, measure
from .train import train

__all__ = ["Ablation", "Story", "Table", "ablate", "causes", "measure", "story", "train"]
