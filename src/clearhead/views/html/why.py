"""Why a head looks where it looks, as data for a page."""

from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import AttentionError
from ...core.errors.limits import MOST_COMPARED_TOKENS
from ...models.report import Report
from ...models.report.opening import best_heads, opening
from ...models.report.text_model import TextModel
from ...models.roles.table import LABELS, REPEATS
from ...models.why import Reasons, Why
from ...models.why.score_paths import Component
from . import schema
from .document import fields_of

LARGEST = 6  # parts of each side
STEPS = 4  # heads of a circuit, walked back from the one with which a page opens


def why_data(result: Why) -> schema.Why:
    """Return the parts of one weight for the script. Its sentence names positions, not tokens."""
    tensors = {"frequencies": result.frequencies, "further": result.further(2 ** torch.arange(7))}
    return fields_of(
        schema.Why,
        result,
        against=str(result.against),
        sentence=result.sentence(),
        wrote_key=_side(result, "key"),
        wrote_query=_side(result, "query"),
        **{name: None if x is None else x.tolist() for name, x in tensors.items()},
    )


def _side(result: Why, of: str) -> schema.WhySide:
    """Return the largest parts of the key or the query, and the sum of the others."""
    parts = result.largest(of, len(result.components))
    return {
        "parts": [_part(result, *part, of) for part in parts[:LARGEST]],
        "others": (len(parts[LARGEST:]), sum(part for _, part in parts[LARGEST:])),
        "total": sum(part for _, part in parts),
    }


def _part(result: Why, component: Component, part: float, of: str) -> schema.WhyPart:
    """Return a part, of a head with the token from which most of it was read."""
    head = source = None
    if component.layer is not None and component.head is not None:
        head = component.layer, component.head
        source = int((part * result.sources(*head, of)).argmax())
    return {"name": str(component), "part": part, "head": head, "source": source}


def why_ahead(model: TextModel, report: Report, text: Any = None) -> Sequence[Why] | str:
    """Compute why the head with which a page opens looks at its largest key, and so for the heads
    before it: each is the head that wrote the largest part of the key of the one after it. Then for
    the best head of the roles that repeat, such as induction, at its largest weight.

    The walk ends at a head that cannot be split, or to whose key no head wrote. If the first cannot
    be split, this returns the reason. It is empty for a page that opens at no particular head.
    `text` is what the model read; None means that of the report.
    """
    begin = opening(report)
    if begin is None:
        return ()
    if len(report.tokens) > MOST_COMPARED_TOKENS:
        return f"The text has more than {MOST_COMPARED_TOKENS:,} tokens."
    at: tuple[()] | tuple[int, int, int, int]
    at, walked = (begin.head.layer, begin.head.head, begin.query, begin.key), list[Why]()
    try:
        inputs = model.tokens_and_inputs(report.text if text is None else text)[1]
        reasons = Reasons(model.module, inputs)
        while at and len(walked) < STEPS:
            walked.append(reasons.why(*at))
            at = _before(walked[-1], at[-1])
        best = best_heads(report)
        for head in [best[LABELS[name]] for name in REPEATS if LABELS[name] in best]:
            link = head.links[0]
            walked.append(reasons.why(head.layer, head.head, link.query, link.key))
    except (AttentionError, RuntimeError) as error:  # such as a kernel without gradients
        if not walked:
            return f"It was not computed: {str(error)[:500]}"
    return walked


def _before(result: Why, key: int) -> tuple[()] | tuple[int, int, int, int]:
    """Return the head that wrote most of the key, at the key and at the token that it read from.

    This is () if no head wrote a large part of it.
    """
    for component, part in result.largest("key", LARGEST):
        wrote = _part(result, component, part, "key")
        if part * result.contrast > 0 and wrote["head"] is not None and wrote["source"] is not None:
            return *wrote["head"], key, wrote["source"]
    return ()
