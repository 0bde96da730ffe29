"""The edits of attention and the masks that a page offers, each described once.

The page makes its controls of them and reads addresses by them; `clearhead.serve` reads requests by
them; a model in the page knows the masks by their arguments.
"""

import dataclasses
import math

from ...errors.limits import MOST_SEED
from ...masks.parse import CALLS, NAMES
from .schema import Masks, NumberEdit

MOST = 1e30  # of a number; what is larger is not distinguishable from infinity in float32

EDITS: dict[str, NumberEdit] = {
    "off": {
        "kind": "heads",
        "default": [],
        "label": "Head",
        "words": "Heads that are off give 0.",
        "rule": "a list of [layer, head]",
    },
    "temperature": {
        "kind": "number",
        "default": 1,
        "label": "Temperature",
        "words": "Every score is divided by it before softmax: above 1 evens the weights out, "
        "below 1 sharpens them.",
        "rule": "a positive number",
        "example": 2,
        "over": 0,
        "below": MOST,
        "slider": (-2, 3, 0.1),
        "doubles": True,
    },
    "scale": {
        "kind": "number",
        "default": None,
        "label": "Scale",
        "words": "Every score is multiplied by it; left empty, by what the model has, mostly 1/√d "
        "of d features.",
        "rule": "a number",
        "example": 0.125,
        "over": -MOST,
        "below": MOST,
        "placeholder": "1/√d",
    },
    "mask": {
        "kind": "mask",
        "default": None,
        "label": "Mask",
        "words": "Which keys a query may look at, of those that the model allows: it only narrows "
        "that.",
        "rule": "a mask such as 'causal & window(3, 0)'",
        "placeholder": "as the model does",
    },
    "softcap": {
        "kind": "number",
        "default": None,
        "label": "Soft cap",
        "words": "Bends the scores so that none is larger than it: c · tanh(score / c); left "
        "empty, as the model does it.",
        "rule": "a positive number",
        "example": 30,
        "over": 0,
        "below": MOST,
        "placeholder": "none",
    },
    "dropout": {
        "kind": "number",
        "default": 0,
        "label": "Dropout",
        "words": "This share of the weights becomes 0 by chance, and the others are enlarged in "
        "return.",
        "rule": "a share from 0 to below 1",
        "example": 0.1,
        "least": 0,
        "below": 1,
        "slider": (0, 0.9, 0.1),
    },
    "seed": {
        "kind": "whole number",
        "default": 0,
        "label": "Seed",
        "words": "Which weights dropout hits: the same seed hits the same ones.",
        "rule": "a whole number, 0 or more",
        "example": 0,
        "least": 0,
        "below": MOST_SEED + 1,
    },
}


def fits(value: float, edit: NumberEdit) -> bool:
    """Is a number within the bounds of an edit?"""
    above = edit.get("over", -math.inf) < value and edit.get("least", -math.inf) <= value
    return above and value < edit.get("below", math.inf)


def _arguments(name: str) -> list[str]:
    fields = dataclasses.fields(CALLS[name])  # type: ignore[arg-type]  # these are dataclasses
    return [field.name for field in fields if field.init and field.name != "align"]


MASKS: Masks = {
    "suggested": [
        {"mask": "", "words": "as the model does", "changes_causal": True},
        {"mask": "causal", "words": "causal", "changes_causal": False},
        {"mask": "causal & window(3, 0)", "words": "the last 3 before it", "changes_causal": True},
        {"mask": "window(2, 2)", "words": "2 on each side", "changes_causal": False},
    ],
    # Masks that need no tensor.
    "arguments": {
        **{name: [] for name in reversed(NAMES)},
        **{name: _arguments(name) for name in ("window", "prefix", "lengths")},
    },
}
