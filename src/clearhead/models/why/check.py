"""Compare the largest parts of a score with path edits of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.functional.ambient import without_followers
from ..inspect.edits import Edit, ablate, patch, path
from ..inspect.edits.path import without_paths
from .result import Check, Why
from .score_paths import Component
from .split import Split

_CHECKED = 3  # parts of each side
_LEAST = 0.01  # smaller differences of weights are neither a sign nor an order


def check_parts(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], why: Why, split: Split
) -> tuple[Check, ...]:
    """Measure the weight without each of the largest heads and MLPs, in the keys and the query."""
    scale, (q,) = split.run.problem.scale, split.q
    raw = split.rows.raw[0]

    def weight(raw: Tensor) -> float:
        weights = split.rows.weights_of(raw[None], split.run.problem)[0]
        return float(weights[why.weights.argmax() if why.key is None else why.key])

    checks: list[Check] = []
    for of in ("key", "query"):
        every = why.largest(of, len(why.components))
        largest = [x for x in every if x[0].kind in ("head", "mlp")][:_CHECKED]
        if not largest:
            continue
        receiver = why.layer, split.g if of == "key" else why.head
        edits = [path(_sender(component), receiver, of) for component, _ in largest]
        with torch.no_grad(), without_followers():
            patches = without_paths(edits, model, inputs)
        lacks = split.by_key if of == "key" else scale * split.factors("query") @ split.k.T
        changes: list[tuple[float, float]] = []  # by the part and by the edit
        for (component, _), edit in zip(largest, patches, strict=True):
            assert isinstance(edit, patch)
            call = edit.recording[-1]
            edited_q, k = q, split.k
            if of == "key" and call.key is not None:
                k = call.key[0, split.g].double()
            elif call.query is not None:
                edited_q = call.query[0, split.h, why.query].double()
            frozen = weight(raw - lacks[why.components.index(component)])
            changes.append((frozen - why.weight, weight(scale * (k @ edited_q)) - why.weight))
        for x, change, agrees in zip(largest, changes, agreements(changes), strict=True):
            frozen, edited = (why.weight + by for by in change)
            checks.append(Check(x[0], of, x[1], why.weight, frozen, edited, agrees))
    return tuple(checks)


def agreements(changes: Sequence[tuple[float, float]]) -> list[bool]:
    """Return whether two measures of a change agree on its sign and its order among all."""
    others = [(0.0, 0.0), *changes]
    return [
        all((a - x) * (b - y) > 0 or min(abs(a - x), abs(b - y)) < _LEAST for x, y in others)
        for a, b in changes
    ]


def _sender(component: Component) -> Edit | str:
    if component.layer is None or component.head is None:
        return component.module
    return ablate(layers=[component.layer], heads=[component.head])
