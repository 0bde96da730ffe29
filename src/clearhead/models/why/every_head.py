"""Split the contrasts of all heads of a model, over all queries of a text.

Letters: C components, H heads, Tq queries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.torch_state import own_dtypes
from ...nn.token_ids import as_batch
from ..follow.refused_models import weights_must_be_whole
from ..weights.attention_weights import rotary_of_call
from ..weights.norms_and_rotations import Rotary
from .score_paths import Component, record_scores
from .split import SIDES, Split


class HeadReasons(NamedTuple):
    """Why the heads of a layer look at their keys more than at all keys that they see.

    `terms` are those of `Terms` for each query, (H, Tq, 4), whose sum is the contrast of the query.
    `key_parts` and `query_parts` are sums over all queries, by what wrote the keys and the queries,
    (H, C). Each sums to the sum of all contrasts.
    """

    terms: Tensor
    components: tuple[Component, ...]
    key_parts: Tensor
    query_parts: Tensor


@torch.inference_mode(False)  # it needs gradients inside torch.no_grad(), too
@torch.enable_grad()
def reasons_of_heads(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    rotaries: Sequence[Rotary | None] | None = None,
) -> tuple[list[HeadReasons], list[Rotary | None]]:
    """Split the contrasts of `why` with ``over="rows"`` for each head, in one run of the model.

    Returns the reasons of each layer, and its rotation, which another text needs not find again.
    Raises the errors of `why`, and `BadValue` if a rotation is unknown.
    """
    weights_must_be_whole("why", model)
    layers = []
    with own_dtypes():
        runs = record_scores(model, as_batch(inputs), None)
        if rotaries is None:
            rotaries = [rotary_of_call(model, x.target.attention, x.target.inside) for x in runs]
        for run, rotary in zip(runs, rotaries, strict=True):
            heads = range(run.problem.H)
            splits = [Split(run, None, None, h, "others", rotary) for h in heads]
            sides = [zip(*(x.totals(of) for x in splits), strict=True) for of in SIDES]
            (keys, of_keys), (queries, of_queries) = (map(torch.stack, side) for side in sides)
            reached = (of_keys | of_queries).any(0)
            names = [
                c for c, is_part in zip(run.components, reached.tolist(), strict=True) if is_part
            ]
            parts = torch.stack([keys, queries])[..., reached]
            if run.problem.bias is not None:
                names.append(Component("distance", None, None, ""))
                bias = torch.stack([split.of_bias.sum() for split in splits])
                parts = torch.cat([parts, bias.expand(2, -1).unsqueeze(-1)], -1)
            terms = torch.stack([split.row_terms() for split in splits])
            layers.append(HeadReasons(terms, tuple(names), *parts))
    return layers, [*rotaries]
