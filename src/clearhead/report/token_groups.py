"""Which keys are repeats of the query's token, come after one, or are separators.

A head's share of weight and the count of its queries both ask here, so that they speak of the same
keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .head_label import is_separator


def token_ids(tokens: Sequence[str]) -> Tensor:
    """A number for each token, (T,); the same token has the same number.

    >>> token_ids(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])


def repeated(ids: Tensor, first: int) -> Tensor:
    """Which tokens occurred before, (T,): at the key `first` or later, and not as the token just
    before.

    >>> repeated(token_ids("a b b a a".split()), 0).tolist()
    [False, False, False, True, True]
    """
    T = len(ids)
    keys = torch.arange(T)
    earliest = torch.full((T,), T).scatter_reduce(0, ids[first:], keys[first:], "amin")
    return earliest[ids] < keys - 1


def repeat_groups(ids: Tensor, queries: Tensor, keys: Tensor, first: int) -> dict[str, Tensor]:
    """Is the key right after an earlier occurrence of the query's token ("induction"), or is it one
    ("duplicate")? `queries` and `keys` are positions that broadcast; a key of -1 is none.

    The key `first`, the query itself and the key before it do not count: a head may look there
    whatever the token.
    """
    counts = (keys > first) & (keys < queries - 1)
    return {
        "induction": (ids[(keys - 1).clamp(min=0)] == ids[queries]) & counts,
        "duplicate": (ids[keys.clamp(min=0)] == ids[queries]) & counts,
    }


def separators(tokens: Sequence[str] | None, Tk: int, first: int) -> Tensor:
    """Which keys are punctuation or special, (Tk,); none if the tokens are not known. The key
    `first` is not, as it is a group of its own."""
    if tokens is None:
        return torch.zeros(Tk, dtype=torch.bool)
    found = torch.tensor([is_separator(token) for token in tokens])
    found[first] = False
    return found
