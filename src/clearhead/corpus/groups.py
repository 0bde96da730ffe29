"""Find groups in sorted arrays of records, and reduce piles of them."""

from collections.abc import Callable, Sequence

import numpy as np


def first_of_groups(records: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return which records differ from the one before in one of these fields, (n,).

    >>> letters = np.array([("a",), ("a",), ("b",)], [("letter", "U1")])
    >>> first_of_groups(letters, ["letter"]).tolist()
    [True, False, True]
    """
    fields, first = records[list(names)], np.ones(len(records), dtype=bool)
    first[1:] = fields[1:] != fields[:-1]
    return first


def rank_in_group(first: np.ndarray) -> np.ndarray:
    """Return the place of each record in its group, from 0.

    >>> rank_in_group(np.array([True, False, True])).tolist()
    [0, 1, 0]
    """
    at = np.arange(len(first))
    return at - np.maximum.accumulate(np.where(first, at, 0))


class Pile:
    """Records that are reduced whenever they have doubled: the time grows with their number."""

    def __init__(self, reduce: Callable[[np.ndarray], np.ndarray], empty: np.ndarray) -> None:
        self._reduce, self._parts = reduce, [empty]
        self._size, self._reduced = 0, 100_000

    def add(self, records: np.ndarray) -> None:
        self._parts.append(records)
        self._size += len(records)
        if self._size > 2 * self._reduced:
            self._reduced = max(self._reduced, len(self.result()))

    def result(self) -> np.ndarray:
        """Return the records so far."""
        self._parts = [self._reduce(np.concatenate(self._parts))]
        self._size = len(self._parts[0])
        return self._parts[0]
