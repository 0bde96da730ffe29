"""Count which kind of key each query looks at, by the class of its token."""

import torch
from torch import Tensor

from .basic import KINDS
from .token_classes import CLASSES

# The kinds that are a behaviour, with the metric of their mass. "first" is where a head rests, and
# "near" and "far" are the keys of no other kind.
BEHAVIOURS = {
    "self": "self", "previous": "previous", "induction": "induction", "duplicate": "duplicate",
    "separator": "separators", "ahead": "ahead",
}  # fmt: skip
NUMBERS = [list(KINDS).index(kind) for kind in BEHAVIOURS]
SHAPE = (len(CLASSES), len(KINDS), 2)


def add_looks(looks: Tensor, texts: Tensor, classes: Tensor, fits: Tensor, chooses: Tensor) -> None:
    """Count the queries of a batch in `looks`, (n, H, *SHAPE).

    An entry is the number of queries of a text, head, class and kind: [..., 0] whose key has no
    other behaviour, [..., 1] the others. So a token before that is also punctuation is counted as
    "previous", and shows neither of the two.

    `texts` has the row of each context, (B,), and `classes` the class of each query, (B, T). `fits`
    are the kinds that fit the key with the largest weight, (K, B, H, T), and `chooses` the queries
    that count, (B, T).
    """
    kind = fits.to(torch.uint8).argmax(0)
    several = fits[NUMBERS].sum(0) > 1
    B, H, _ = kind.shape
    row = texts.view(B, 1, 1) * H + torch.arange(H).view(1, H, 1)
    index = row * SHAPE[0] + classes.unsqueeze(1)
    index = (index * SHAPE[1] + kind) * SHAPE[2] + several
    entries = index[chooses.unsqueeze(1) & fits.any(0)]
    looks.view(-1).index_add_(0, entries, torch.ones_like(entries, dtype=looks.dtype))


def sum_by_class(values: Tensor, classes: Tensor, chooses: Tensor) -> Tensor:
    """Sum values over the queries of each class that count, all (B, T), as (C,) in float64."""
    sums = torch.zeros(len(CLASSES), dtype=torch.float64)
    return sums.index_add_(0, classes[chooses], values[chooses].double())
