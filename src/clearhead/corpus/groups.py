"""Find groups in an array of records that is sorted by some fields."""

from collections.abc import Sequence

import numpy as np


def first_of_groups(records: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return which records differ from the one before in one of these fields, (n,).

    >>> letters = np.array([("a",), ("a",), ("b",)], [("letter", "U1")])
    >>> first_of_groups(letters, ["letter"]).tolist()
    [True, False, True]
    """
    first = np.ones(len(records), dtype=bool)
    for name in names:
        change = records[name][1:] != records[name][:-1]
        first[1:] = change if name == names[0] else first[1:] | change
    return first


def rank_in_group(first: np.ndarray) -> np.ndarray:
    """Return the place of each record in its group, from 0.

    >>> rank_in_group(np.array([True, False, True])).tolist()
    [0, 1, 0]
    """
    at = np.arange(len(first))
    return at - np.maximum.accumulate(np.where(first, at, 0))
