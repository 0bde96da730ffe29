"""Survey every head of a model over many texts.

`run` calls the steps in `steps`: `corpus` cuts texts into shards, `collect` computes the state of
one, and `merge` folds states into the tables that `tables` describes. `metric` defines what is
measured, and `result` reads the tables.
"""

from . import compare, forgetting, mixes, tables, vectors
from .metric import Batch, Bins, LayerCall, Mass, Metric
from .random_tokens import Needles, RandomRepeats
from .result import Survey
from .run import survey
from .tables import Table

__all__ = [
    "Batch", "Bins", "LayerCall", "Mass", "Metric", "Needles", "RandomRepeats", "Survey", "Table",
    "survey",
]  # fmt: skip

# The names of this package that users need, also as `clearhead.corpus.Metric`: the attribute
# `clearhead.survey` is the function.
vars(survey).update(
    Batch=Batch, Bins=Bins, LayerCall=LayerCall, Mass=Mass, Metric=Metric, Needles=Needles,
    RandomRepeats=RandomRepeats, Survey=Survey, Table=Table, compare=compare, forgetting=forgetting,
    mixes=mixes, tables=tables, vectors=vectors,
)  # fmt: skip
