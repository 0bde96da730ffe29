"""Classes of tokens, by their spelling and place: does a head look elsewhere from a line's end?"""

import unicodedata
from collections.abc import Mapping

import torch
from torch import Tensor

from ..models.roles.role_keys import is_special

# The classes, from the first that fits on.
CLASSES = {
    "first": "the first token of a context",
    "space": "spaces and ends of lines",
    "punctuation": "punctuation and symbols",
    "digit": "a number, or its beginning",
    "start": "the beginning of a word",
    "continuation": "the rest of a word",
    "other": "special tokens, and incomplete characters",
}
NAMES = list(CLASSES)
_INSIDE = "'\u2019"  # of words


def token_classes(ids: Tensor, spelling: Mapping[int, str], spaced: bool) -> Tensor:
    """Return the number in `CLASSES` of each token of contexts, (B, T).

    A word begins after a space, or after a token that does not end in a letter. With `spaced`, the
    vocabulary writes the space before a word; otherwise each token is a word.

    >>> spelling = dict(enumerate(["Two", " owl", "s", ".", "\\n", "42", "It"]))
    >>> [NAMES[i] for i in token_classes(torch.arange(7).view(1, 7), spelling, True)[0]]
    ['first', 'start', 'continuation', 'punctuation', 'space', 'digit', 'start']
    """
    known, numbers = ids.unique(return_inverse=True)
    texts = [spelling[i] for i in known.tolist()]
    own = torch.tensor([NAMES.index(_class_of(text)) for text in texts])
    joins = torch.tensor([spaced and _is_letter(text[:1]) for text in texts])
    ends = torch.tensor([_is_letter(text[-1:]) for text in texts])
    classes = own[numbers]
    after_letter = torch.zeros_like(classes, dtype=torch.bool)
    after_letter[:, 1:] = ends[numbers[:, :-1]]
    inside = (classes == NAMES.index("start")) & joins[numbers] & after_letter
    classes = classes.masked_fill(inside, NAMES.index("continuation"))
    classes[:, 0] = NAMES.index("first")
    return classes


def _class_of(text: str) -> str:
    """Return the class of a token by its spelling alone; a word is a start."""
    body = text.strip("▁Ġ \t\r\n")
    if not body or set(body) <= {"Ċ", "↵"}:
        return "space"
    if body[0] == "⟨" or is_special(body):
        return "other"
    if all(unicodedata.category(char)[0] in "PS" for char in body):
        return "punctuation"
    return "digit" if body[0].isdigit() else "start"


def _is_letter(char: str) -> bool:
    return char.isalpha() or (bool(char) and char in _INSIDE)
