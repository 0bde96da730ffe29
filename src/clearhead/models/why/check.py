"""Compare the largest parts of a score with path edits of the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core.functional.ambient import without_followers
from ...nn.token_ids import run_with_known_ids
from ..follow.copies import fresh
from ..inspect.edits import Edit, ablate, path
from ..inspect.intervene import intervene
from ..inspect.watch import watch
from .result import Check, Why
from .split_row import ScoreRow, SplitRow

_CHECKED = 3  # parts of each side
_LEAST = 1e-3  # a smaller change of a weight has no sign


def check_parts(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    why: Why,
    split: SplitRow,
    row: ScoreRow,
) -> tuple[Check, ...]:
    """Measure the weight without each of the largest heads and MLPs, in the keys and the query."""
    p = split.run.problem
    checks: list[Check] = []
    for of in ("key", "query"):
        candidates = [
            x for x in why.largest(of, len(why.components)) if x[0].kind in ("head", "mlp")
        ]
        receiver = why.layer, split.g if of == "key" else why.head
        removed = split.by_key
        if of == "query":
            removed = p.scale * split.query_factors() @ split.k.T
        changes: list[tuple[float, float]] = []
        for component, part in candidates[:_CHECKED]:
            without = row.raw - removed[why.components.index(component)].masked_fill(
                ~row.visible, 0.0
            )
            frozen = _weight(row.weights_of(without, p), why)
            sender: Edit | str = component.module
            if component.layer is not None and component.head is not None:
                sender = ablate(layers=[component.layer], heads=[component.head])
            edited = _edited_weight(model, inputs, path(sender, receiver, of), why)
            changes.append((frozen - why.weight, edited - why.weight))
            checks.append(Check(component, of, part, why.weight, frozen, edited, True))
        numbers = range(len(changes))
        ranks = [
            sorted(numbers, key=[change[road] for change in changes].__getitem__) for road in (0, 1)
        ]
        for n, (by_part, by_edit) in enumerate(changes):
            opposite = min(abs(by_part), abs(by_edit)) > _LEAST and by_part * by_edit < 0
            same = ranks[0].index(n) == ranks[1].index(n)
            at = len(checks) - len(changes) + n
            checks[at] = checks[at]._replace(agrees=same and not opposite)
    return tuple(checks)


def _weight(weights: Tensor, why: Why) -> float:
    return float(weights[why.weights.argmax() if why.key is None else why.key])


def _edited_weight(model: nn.Module, inputs: Any, edit: path, why: Why) -> float:
    """Return the weight in a run with the edit."""
    with torch.no_grad(), without_followers():
        patch = edit.as_patch(model, inputs)
        recording = watch(
            model, stats=[], exact_rows=[why.query], layers=[why.layer], heads=[why.head]
        )
        with intervene(model, [patch]), recording as recorded:
            run_with_known_ids(model, fresh(inputs))
    rows = recorded[-1].statistics["exact_rows"]
    assert isinstance(rows, Tensor)
    return _weight(rows[0, 0, 0].double(), why)
