"""Count which kind of key each query looks at, by the class of its token: spelling and place."""

import unicodedata
from collections.abc import Mapping

import torch
from torch import Tensor

from ..models.roles.role_keys import is_special
from .basic import KINDS

# The classes, from the first that fits on.
CLASSES = {
    "first": "the first token of a context",
    "space": "spaces and ends of lines",
    "punctuation": "punctuation and symbols",
    "digit": "a number, or its beginning",
    "start": "the beginning of a word",
    "continuation": "the rest of a word",
    "other": "special tokens, incomplete characters, and patches of pictures",
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


# The kinds that are a behaviour, with the metric of their mass. "first" is where a head rests, and
# "near" and "far" are the keys of no other kind.
BEHAVIOURS = {
    "self": "self", "previous": "previous", "induction": "induction", "duplicate": "duplicate",
    "separator": "separators", "ahead": "ahead",
}  # fmt: skip
NUMBERS = [list(KINDS).index(kind) for kind in BEHAVIOURS]
SHAPE = (len(CLASSES), len(KINDS), 2)


def add_looks(
    looks: Tensor, texts: Tensor, classes: Tensor, kind: Tensor, fits: Tensor, chooses: Tensor
) -> None:
    """Count the queries of a batch in `looks`, (n, H, *SHAPE).

    An entry is the number of queries of a text, head, class and kind: [..., 0] whose key has no
    other behaviour, [..., 1] the others. So a token before that is also punctuation is counted as
    "previous", and shows neither of the two.

    `texts` has the row of each context, (B,), and `classes` the class of each query, (B, T). `kind`
    is that of the key with the largest weight, (B, H, T), -1 without a key, and `fits` all that fit
    it, (K, B, H, T). `chooses` are the queries that count, (B, T).
    """
    several = fits[NUMBERS].sum(0) > 1
    B, H, _ = kind.shape
    row = texts.view(B, 1, 1) * H + torch.arange(H).view(1, H, 1)
    index = row * SHAPE[0] + classes.unsqueeze(1)
    index = (index * SHAPE[1] + kind) * SHAPE[2] + several
    entries = index[chooses.unsqueeze(1) & (kind >= 0)]
    looks.view(-1).index_add_(0, entries, torch.ones_like(entries, dtype=looks.dtype))


def sum_by_class(values: Tensor, classes: Tensor, chooses: Tensor) -> Tensor:
    """Sum values over the queries of each class that count, all (B, T), as (C,) in float64."""
    sums = torch.zeros(len(CLASSES), dtype=torch.float64)
    return sums.index_add_(0, classes[chooses], values[chooses].double())
