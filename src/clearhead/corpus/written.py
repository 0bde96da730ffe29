"""The metrics of what heads write: the sets `values` and `attribution`.

A value v writes v W_O into the residual stream, where W_O is the part of the layer's output
projection that reads the head. So a weight on a small value adds little: a head that attends to the
first token most may write almost nothing from there. The set `values` has norm-weighted attention,
and what varies.

The set `attribution` has what heads write toward the actual next token. The part of a head in a
logit is its direct effect, without that on later layers. It is computed by `logit_attribution`, in
a run of its own for each context.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..core.errors import BadValue
from ..core.stats import Statistic, value_weighted
from ..models.effects.digest import weights_digest
from ..models.inspect.watch import watch
from ..models.weights.logit_attribution import logit_attribution
from .basic import Distances, First, Separators
from .metric import Batch, Bins, LayerCall, Mass, Metric, WithoutBaseline, needed_by
from .reader import Reader

RECENT = 16


class NormWeighted(Metric):
    """The norm-weighted attention on keys: each weight times |v W_O|, divided by their sum.

    It is 0 if all values of a query's keys are 0. Its mean is over the queries of the mass. Norms
    ignore that what two keys write may cancel.
    """

    source = "Kobayashi et al. 2020, arXiv 2004.10102"

    def __init__(self, mass: Mass) -> None:
        self.name, self.mass = f"norm_weighted_{mass.name}", mass
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
    with needed_by("values", "to know what heads write"), watch(reader.module, stats=["varying"]):
        reader.run(torch.tensor([[number // 2, number // 3]]))
    masses: list[Mass] = [
        First(), Distances("self", 0, 1), Distances("previous", 1, 2), Separators()
    ]  # fmt: skip
    if context > RECENT:
        masses.append(Distances(f"last_{RECENT}", 0, RECENT))
    return [*masses, *map(NormWeighted, masses), Varies()]


class Parts:
    """What each head of a model writes toward each next token, for the last batch."""

    def __init__(self, predictor: nn.Module) -> None:
        self.predictor, self.digest = predictor, weights_digest(predictor)
        self.of_heads = lru_cache(maxsize=1)(self._of_heads)

    def _of_heads(self, batch: Batch) -> Tensor:
        """Compute the parts, (B, L, H, T); 0 at the last query."""
        return pad(torch.stack([self.of_context(ids) for ids in batch.ids]), (0, 1))

    def of_context(self, ids: Tensor) -> Tensor:
        """Compute the parts of one context, (L, H, T - 1)."""
        if len(ids) < 2:
            return logit_attribution(self.predictor, ids, 0).heads[..., :0]
        return logit_attribution(self.predictor, ids, center=True).heads


class TowardNext(WithoutBaseline):
    """What a head writes toward the logit of the next token, minus that toward the mean logit.

    The mean is over the queries whose next token is of the text, and not one that the tokenizer
    adds around it.
    """

    name = "toward_next"
    formula = (
        "z W_O · (u - mean u) · scale: z W_O is the head's output, u the unembedding of x[q + 1]"
    )
    source = "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits"
    bins = Bins(-8.0, 8.0, count=160, bounds=(None, None))

    def __init__(self, parts: Parts, before: int, after: int) -> None:
        self.parts, self.before, self.after = parts, before, after
        self.settings = {"digest of the predictor": parts.digest}

    def begin(self, batch: Batch) -> None:
        self.parts.of_heads(batch)

    def values(self, call: LayerCall) -> Tensor:
        return self.parts.of_heads(call.batch)[:, call.layer]

    def counts(self, uniform: LayerCall) -> Tensor:
        T = uniform.batch.ids.shape[1]
        following = torch.arange(1, T + 1)
        return ((following >= self.before) & (following < T - self.after)).view(1, 1, T)


class NextShare(TowardNext):
    """The share of a head in what all heads write toward and against the next token.

    The means of all heads sum to 1.
    """

    name = "next_share"
    formula = "|toward_next| / Σ |toward_next|, the sum over all heads of all layers"
    source, bins = "clearhead", Bins()

    def values(self, call: LayerCall) -> Tensor:
        sizes = self.parts.of_heads(call.batch).abs()
        total = sizes.sum((1, 2))
        return sizes[:, call.layer] / total.masked_fill(total == 0, 1.0).unsqueeze(1)


def attribution(reader: Reader, context: int) -> list[Metric]:
    """Return what heads write toward the actual next token.

    Raises `BadValue` for a model without logits, or whose logits cannot be split: before the survey
    begins, the logits of two tokens are.
    """
    if reader.predictor is None:
        gave = f"metrics has 'attribution', and {reader.name} has no logits of the next token."
        rule = "the metrics of 'attribution' split the logit of the next token."
        hint = "leave out 'attribution', or pass a model that predicts the next token."
        raise BadValue(gave, rule, hint)
    number = len(reader.words)
    with needed_by("attribution", "logits that can be split"):
        logit_attribution(reader.predictor, torch.tensor([number // 2, number // 3]))
    parts, (before, after) = Parts(reader.predictor), map(len, reader.around)
    return [TowardNext(parts, before, after), NextShare(parts, before, after)]
