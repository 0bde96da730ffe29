"""Why heads look where they look: the set `reasons`.

A head prefers some keys to others. The contrast of a query is the mean of its scores under its
weights, minus their mean over all keys that it may look at: what `clearhead.why` splits for a row.
Without a sink and a soft cap it is KL(w | u) + KL(u | w) of the weights w and uniform ones u, in
nats. Each context is split in a run of its own. The means of terms are over all queries and all
keys of the head in the context, before rotation.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..models.why.split import SIDES, HeadReasons, reasons_of_heads
from .metric import Batch, Bins, ComponentSums, LayerCall, Metric, WithoutBaseline, needed_by
from .reader import Reader

FORMULAS = {  # of the contrast, and the terms that sum to it
    "contrast": "Σ w s - mean s, of the scores s of the keys that the query may look at",
    "position": "contrast of the mean query with mean keys at all distances, and the position bias",
    "query_by_position": "contrast of the query without its mean with mean keys at all distances",
    "key_alone": "contrast of the mean query with the keys without their mean",
    "match": "contrast of the query with the keys, both without their means",
}


# The reasons of each layer, of one context of a batch after the other.
OfBatch = Callable[[Batch], list[tuple[HeadReasons, ...]]]


class Contrast(WithoutBaseline):
    """By how much a query prefers the keys that it looks at; or a term of this."""

    bins = Bins(-32.0, 32.0, count=128, bounds=(None, None))

    def __init__(self, layers: OfBatch, name: str) -> None:
        self.layers, self.name, self.formula = layers, name, FORMULAS[name]

    def begin(self, batch: Batch) -> None:
        self.layers(batch)

    def values(self, call: LayerCall) -> Tensor:
        terms = torch.stack([x.terms for x in self.layers(call.batch)[call.layer]])
        term = [*FORMULAS].index(self.name)
        return terms[..., term - 1] if term else terms.sum(-1)

    def components(self, batch: Batch, layer: int) -> ComponentSums:
        contexts, parts = self.layers(batch)[layer], ComponentSums()
        for side in SIDES if self.name == "contrast" else ():
            sums = torch.stack([getattr(x, f"{side}_parts") for x in contexts])
            for component, part in zip(contexts[0].components, sums.unbind(-1), strict=True):
                name = side, str(component)
                parts[name] = parts[name] + part if name in parts else part
        return parts


def reasons(reader: Reader, context: int) -> list[Metric]:
    """Return the contrast of heads, its terms and its parts.

    Raises `BadValue` for a model whose scores `why` cannot split: before the survey begins, those
    of a few tokens are, in all layers.
    """
    number = len(reader.words)
    with needed_by("reasons", "scores that can be split"):
        reasons_of_heads(reader.module, (number // 2 + torch.arange(min(8, context))) % number)

    @lru_cache(maxsize=1)
    def layers(batch: Batch) -> list[tuple[HeadReasons, ...]]:
        return [*zip(*(reasons_of_heads(reader.module, ids) for ids in batch.ids), strict=True)]

    return [Contrast(layers, name) for name in FORMULAS]
