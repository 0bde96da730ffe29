"""Why heads look where they look: the set `reasons`.

A head prefers some keys to others. The contrast of a query is the mean of its scores under its
weights, minus their mean over all keys that it may look at: what `clearhead.why` splits for a row.
Without a sink and a soft cap it is KL(w | u) + KL(u | w) of the weights w and uniform ones u, in
nats. Each context is split in a run of its own.
"""

import torch
from torch import Tensor

from ..core.errors import AttentionError, BadValue
from ..models.why.every_head import HeadReasons, reasons_of_heads
from .metric import Batch, Bins, LayerCall, Metric, Parts, WithoutBaseline
from .reader import Reader

TERMS = {
    "position": "of the mean query and the mean key at this distance, with the position bias",
    "query_by_position": "of the query without its mean, and the mean key at this distance",
    "key_alone": "of the mean query, and the key without its mean",
    "match": "of the query and the key, both without their means",
}


class Contexts:
    """Why the heads of a model look at their keys, for the last batch."""

    def __init__(self, reader: Reader, ids: Tensor) -> None:
        self.model = reader.module
        _, self.rotaries = reasons_of_heads(self.model, ids)
        self._of: tuple[Batch, list[list[HeadReasons]]] | None = None

    def layers(self, batch: Batch) -> list[list[HeadReasons]]:
        """Return the reasons of each layer, of one context after the other."""
        if self._of is None or self._of[0] is not batch:
            contexts = [reasons_of_heads(self.model, ids, self.rotaries)[0] for ids in batch.ids]
            self._of = batch, [[*layer] for layer in zip(*contexts, strict=True)]
        return self._of[1]


class Term(WithoutBaseline):
    """A term of the contrast. The four terms sum to it.

    The means are over all queries and keys of the head in the context, before rotation.
    """

    bins = Bins(-32.0, 32.0, count=128, bounds=(None, None))
    source = "clearhead"

    def __init__(self, contexts: Contexts, name: str) -> None:
        self.contexts, self.name = contexts, name
        self.formula = f"the part of contrast {TERMS[name]}"

    def begin(self, batch: Batch) -> None:
        self.contexts.layers(batch)

    def values(self, call: LayerCall) -> Tensor:
        at = [*TERMS].index(self.name)
        return torch.stack([x.terms for x in self.contexts.layers(call.batch)[call.layer]])[..., at]


class Contrast(Term):
    """By how much a query prefers the keys that it looks at, and what wrote queries and keys."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts, self.name = contexts, "contrast"
        self.formula = "Σ w s - mean s, of the scores s of the keys that the query may look at"

    def values(self, call: LayerCall) -> Tensor:
        contexts = self.contexts.layers(call.batch)[call.layer]
        return torch.stack([x.terms for x in contexts]).sum(-1)

    def components(self, batch: Batch, layer: int) -> Parts:
        contexts = self.contexts.layers(batch)[layer]
        parts: Parts = {}
        for side in ("key", "query"):
            of_contexts = torch.stack([getattr(x, f"{side}_parts") for x in contexts])
            for name, part in zip(
                map(str, contexts[0].components), of_contexts.unbind(-1), strict=True
            ):
                parts[side, name] = parts.get((side, name), 0.0) + part
        return parts


def reasons(reader: Reader, context: int) -> list[Metric]:
    """Return the contrast of heads, its terms and its parts.

    Raises `BadValue` for a model whose scores `why` cannot split: before the survey begins, those
    of a few tokens are, in all layers.
    """
    number = len(reader.words)
    try:
        contexts = Contexts(reader, (number // 2 + torch.arange(min(8, context))) % number)
    except AttentionError as error:
        raise BadValue(
            f"metrics has 'reasons', which needs scores that can be split. {error.gave}",
            error.rule,
            f"leave out 'reasons', or: {error.hint}",
        ) from error
    return [Contrast(contexts), *(Term(contexts, name) for name in TERMS)]
