"""The edits of attention and the masks that a page offers, described in one place.

The page builds its controls from these descriptions, and uses them to parse addresses.
`clearhead.serve` uses them to parse requests.
"""

import dataclasses
import math

from ...core.errors.limits import MOST_SEED
from ...core.masks.parse import CALLS, NAMES
from .schema import Masks, NumberEdit

MOST = 1e30  # the largest number; larger ones may become infinite in float32

EDITS: dict[str, NumberEdit] = {
    "off": {
        "kind": "heads", "default": [], "label": "Head", "rule": "a list of [layer, head]",
        "words": "Heads that are off output 0.",
    },
    "temperature": {
        "kind": "number", "default": 1, "label": "Temperature", "rule": "a positive number",
        "words": "Scores are divided by it before softmax: above 1 the weights become flatter, "
        "below 1 sharper.",
        "example": 2, "over": 0, "below": MOST, "slider": (-2, 3, 0.1), "doubles": True,
    },
    "scale": {
        "kind": "number", "default": None, "label": "Scale", "rule": "a number",
        "words": "Scores are multiplied by it. Empty: the model's own scale, usually 1/√d for d "
        "features.",
        "example": 0.125, "over": -MOST, "below": MOST, "placeholder": "1/√d",
    },
    "mask": {
        "kind": "mask", "default": None, "label": "Mask",
        "rule": "a mask such as 'causal & window(3, 0)'",
        "words": "The keys that a query may look at, among those that the model allows.",
        "placeholder": "as in the model",
    },
    "softcap": {
        "kind": "number", "default": None, "label": "Soft cap", "rule": "a positive number",
        "words": "Limits the scores: c · tanh(score / c) is at most c. Empty: as in the model.",
        "example": 30, "over": 0, "below": MOST, "placeholder": "none",
    },
    "dropout": {
        "kind": "number", "default": 0, "label": "Dropout",
        "rule": "a probability from 0 to below 1",
        "words": "The probability that a weight becomes 0; the other weights are scaled up.",
        "example": 0.1, "least": 0, "below": 1, "slider": (0, 0.9, 0.1),
    },
    "seed": {
        "kind": "whole number", "default": 0, "label": "Seed", "rule": "a whole number, 0 or more",
        "words": "The seed of dropout: the same seed drops the same weights.",
        "example": 0, "least": 0, "below": MOST_SEED + 1,
    },
}  # fmt: skip


def fits(value: float, edit: NumberEdit) -> bool:
    """Return whether a number is within the bounds of an edit."""
    above = edit.get("over", -math.inf) < value and edit.get("least", -math.inf) <= value
    return above and value < edit.get("below", math.inf)


def _arguments(name: str) -> list[str]:
    fields = dataclasses.fields(CALLS[name])  # type: ignore[arg-type]  # these are dataclasses
    return [field.name for field in fields if field.init and field.name != "align"]


MASKS: Masks = {
    "suggested": [
        {"mask": "", "words": "as in the model", "changes_causal": True},
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
