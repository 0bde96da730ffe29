"""Why a head looks where it looks, as data for a page."""

from ...core.errors import AttentionError
from ...core.errors.limits import MOST_COMPARED_TOKENS
from ...models.report import Report
from ...models.report.opening import opening
from ...models.report.text_model import TextModel
from ...models.why import Why, why
from . import schema
from .document import fields_of

LARGEST = 6  # parts of each side
STEPS = 4  # heads of a circuit, walked back from the one with which a page opens


def why_data(result: Why) -> schema.Why:
    """Return the parts of one weight for the script. Its sentence names positions, not tokens."""
    return fields_of(
        schema.Why,
        result,
        against=str(result.against),
        sentence=result.sentence(),
        wrote_key=_side(result, "key"),
        wrote_query=_side(result, "query"),
        frequencies=None if result.frequencies is None else result.frequencies.tolist(),
    )


def _side(result: Why, of: str) -> schema.WhySide:
    """Return the largest parts of the key or the query, and the sum of the others."""
    parts = result.largest(of, len(result.components))
    others = parts[LARGEST:]
    shown: list[schema.WhyPart] = []
    for component, part in parts[:LARGEST]:
        head = source = None
        if component.layer is not None and component.head is not None:
            head = component.layer, component.head
            read = result.sources(*head, of)
            source = int((read if part > 0 else -read).argmax())
        shown.append({"name": str(component), "part": part, "head": head, "source": source})
    return {
        "parts": shown,
        "others": (len(others), sum(part for _, part in others)),
        "total": sum(part for _, part in parts),
    }


def why_ahead(model: TextModel, report: Report) -> schema.WhyAhead:
    """Return why the head with which a page opens looks at its largest key, and the heads before
    it: each is the head that wrote the largest part of the key of the one after it.

    If the first cannot be computed, `why_withheld` has the reason. A walk ends at a head that
    cannot be split, or that no earlier head wrote to.
    """
    begin = opening(report)
    if begin is None:
        return {}
    if len(report.tokens) > MOST_COMPARED_TOKENS:
        return {"why_withheld": f"The text has more than {MOST_COMPARED_TOKENS:,} tokens."}
    at: tuple[int, int, int, int] | None
    at = begin.head.layer, begin.head.head, begin.query, begin.key
    walked: list[schema.Why] = []
    withheld = ""
    try:
        inputs = model.tokens_and_inputs(report.text)[1]
        while at is not None and len(walked) < STEPS:
            layer, head, query, key = at
            result = why(model.module, inputs, layer=layer, head=head, query=query, key=key)
            walked.append(why_data(result))
            at = _before(walked[-1])
    except AttentionError as error:
        withheld = f"{error.gave} {error.rule}"
    except RuntimeError as error:  # a kernel without gradients, or too little memory
        withheld = f"The model failed with gradients: {str(error)[:500]}"
    return {"why": walked} if walked else {"why_withheld": withheld}


def _before(result: schema.Why) -> tuple[int, int, int, int] | None:
    """Return the head that wrote most of the key, at the key and at the token that it read from."""
    for part in result["wrote_key"]["parts"]:
        helps = part["part"] * result["contrast"] > 0
        if helps and part["head"] is not None and part["source"] is not None:
            return *part["head"], result["key"], part["source"]
    return None
