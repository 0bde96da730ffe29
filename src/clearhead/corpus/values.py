"""The metrics of norm-weighted attention and of what varies, the set `values`.

A value v writes v W_O into the residual stream, where W_O is the part of the layer's output
projection that reads the head. So a weight on a small value adds little: a head that attends to the
first token most may write almost nothing from there.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..core.stats import Statistic, value_weighted
from ..models.inspect.watch import watch
from .basic import Distances, First, Separators
from .metric import Batch, Bins, LayerCall, Mass, Metric
from .reader import Reader

RECENT = 16


class Moved(Metric):
    """The norm-weighted attention on keys: each weight times |v W_O|, divided by their sum.

    It is 0 if all values of a query's keys are 0. Its mean is over the queries of the mass. Norms
    ignore that what two keys write may cancel.
    """

    source = "Kobayashi et al. 2020, arXiv 2004.10102"

    def __init__(self, mass: Mass) -> None:
        self.name, self.mass = f"moved_{mass.name}", mass
        self.formula = f"{mass.formula}, with w |v W_O| / Σ w |v W_O| in place of w"

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        (of_weights,) = self.mass.statistics(batch)
        return [of_weights, value_weighted(of_weights.groups)]

    def values(self, call: LayerCall) -> Tensor:
        return self.mass.values(replace(call, results={"mass": call["value_weighted"]}))

    def counts(self, uniform: LayerCall) -> Tensor:
        return self.mass.counts(uniform)


class Varies(Metric):
    """How far what a head writes is from its mean over the context, squared.

    The mean over all queries of a context is a fraction from 0 to 1: how much of the head's squared
    output varies. The rest is one vector, the same at every query. A context of one token has none.
    """

    name = "varying"
    formula = "|o - mean o|² / mean |o|², means over the queries of a context, o = z W_O"
    bins = Bins(1e-4, 1e4, log=True, bounds=(0.0, 1.0))

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        return ["varying"]

    def values(self, call: LayerCall) -> Tensor:
        share: Tensor = call["varying"]
        return share

    def counts(self, uniform: LayerCall) -> Tensor:
        several = uniform.batch.ids.shape[1] > 1
        return (uniform.allowed > 0) & several


def values(reader: Reader, context: int) -> list[Metric]:
    """Return metrics: norm-weighted attention on groups of keys, their masses, and `varying`.

    Raises `BadValue` for a model whose heads write what is not known: before the survey begins, the
    model runs on two tokens, and each layer must write its heads times its output projection.
    """
    number = len(reader.words)
    try:
        with watch(reader.module, stats=["varying"]):
            reader.run(torch.tensor([[number // 2, number // 3]]))
    except BadValue as error:
        raise BadValue(
            f"metrics has 'values', which need to know what heads write. {error.gave}",
            error.rule,
            f"leave out 'values', or: {error.hint}",
        ) from error
    masses: list[Mass] = [
        First(), Distances("self", 0, 1), Distances("previous", 1, 2), Separators()
    ]  # fmt: skip
    if context > RECENT:
        masses.append(Distances(f"last_{RECENT}", 0, RECENT))
    return [*masses, *map(Moved, masses), Varies()]
