"""Find the keys of each role for a query, and the probability to look at one of them by chance."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .table import NEAR, OFFSETS, PLACES, REPEATS, WINDOWS

# Roles of keys that are the same for every query.
COLUMNS = ("first", "sinks", "separators", "special")
VOTED = (*OFFSETS, *(x for x in PLACES if x not in OFFSETS), *REPEATS, *WINDOWS, *NEAR)
# A query has a vote only if the keys of the role are at most this part of those it may look at.
MOST_CHANCE = 0.5


def is_special(token: str) -> bool:
    """Is the token special, like [SEP] and </s>?

    >>> [is_special(t) for t in ("[SEP]", "<|end|>", ",", "cat")]
    [True, True, False, False]
    """
    return bool(re.fullmatch(r"\[[A-Z_]+\]|</?[\w|]{1,30}>|<\|.{1,40}\|>", token.strip("▁Ġ \t")))


def is_separator(token: str) -> bool:
    """Is the token punctuation or the end of a line?

    >>> [is_separator(t) for t in (",", "Ġ.", "Ċ", "[SEP]", "##s", "cat")]
    [True, True, True, False, False, False]
    """
    body = token.removeprefix("##").strip("▁Ġ \t")
    if re.fullmatch(r"[Ċ\n\r]+", body):
        return True
    return (
        bool(body)
        and not is_special(token)
        and all(unicodedata.category(char)[0] == "P" for char in body)
    )


def columns(tokens: Sequence[str] | None, Tk: int, first: int) -> dict[str, Tensor]:
    """Return the keys of the roles in `COLUMNS`, (Tk,) each; a key has at most one of them.

    "special" is absent without special tokens. Without tokens, no key is a separator. "sinks" are
    known to a layer alone (`RoleKeys.with_sinks`).
    """
    is_first = torch.arange(Tk) == first
    known = [] if tokens is None else list(tokens)
    separators = torch.tensor([is_separator(x) for x in known] or [False] * Tk) & ~is_first
    special = torch.tensor([is_special(x) for x in known] or [False] * Tk) & ~is_first
    chosen = {"first": is_first, "separators": separators}
    return chosen | ({"special": special} if special.any() else {})


def word_numbers(tokens: Sequence[str]) -> Tensor:
    """Number the tokens, (T,); equal tokens have equal numbers.

    >>> word_numbers(["a", "b", "a"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(token, len(numbers)) for token in tokens])


def repeated(ids: Tensor, first: int) -> Tensor:
    """Return which tokens have an earlier copy, (T,), from the key `first` on.

    The previous token does not count.

    >>> repeated(word_numbers("a b b a a".split()), 0).tolist()
    [False, False, False, True, True]
    """
    T = len(ids)
    keys = torch.arange(T)
    earliest = torch.full((T,), T).scatter_reduce(0, ids[first:], keys[first:], "amin")
    return earliest[ids] < keys - 1


class RoleQueries(NamedTuple):
    """The indices of the queries on which a role is tested, (v,), and the numbers of their words.

    `uniform` is the mean over them of uniform weights on the keys of the role.
    """

    queries: Tensor
    words: Tensor
    uniform: float


@dataclass(frozen=True, eq=False)
class RoleKeys:
    """The roles of keys for n queries under one mask.

    `queries`, (n,), are their numbers, and `at` their positions among the keys, or None if queries
    and keys are from two texts. `words`, (n,), and `key_words`, (Tk,), number the words. `keep`,
    (n, Tk), is the mask. `columns` is the result of the function `columns`. `repeats` is True if
    the words are known. `places`, (Tk, 2), are the rows and columns of the patches of an image;
    None for a text.
    """

    queries: Tensor
    at: Tensor | None
    words: Tensor
    key_words: Tensor
    keep: Tensor
    columns: dict[str, Tensor]
    first: int
    repeats: bool
    places: Tensor | None = None

    @cached_property
    def choices(self) -> Tensor:
        """The number of keys that a query may look at, (n,)."""
        return self.keep.sum(-1)

    @cached_property
    def away(self) -> Tensor | None:
        """The rows and columns from each query to each key, (n, Tk, 2); None for a text."""
        if self.places is None or self.at is None:
            return None
        return self.places - self.places[self.at].unsqueeze(1)

    @cached_property
    def voted(self) -> dict[str, Tensor]:
        """The keys of each role in `VOTED`, (n, Tk), without the first key: it has its own role."""
        if self.at is None:
            return {}
        keys = torch.arange(self.keep.shape[1])
        offset = keys - self.at.unsqueeze(-1)
        allowed = self.keep & (keys != self.first)
        if self.places is not None and self.away is not None:
            is_patch = (self.places >= 0).all(-1) & allowed
            cells = {n: (self.away == torch.tensor(x)).all(-1) for n, x in PLACES.items()}
            cells |= {name: self.away.abs().amax(-1) < size for name, size in NEAR.items()}
            return {name: cell & is_patch for name, cell in cells.items()}
        cells = {name: offset == distance for name, distance in OFFSETS.items()}
        if self.repeats:
            earlier = (keys > self.first) & (offset < -1)
            word = self.words.unsqueeze(-1)
            cells["induction"] = (self.key_words.roll(1) == word) & earlier
            cells["duplicate"] = (self.key_words == word) & earlier
        cells |= {name: offset.abs() < size for name, size in WINDOWS.items()}
        return {name: cell & allowed for name, cell in cells.items()}

    def with_sinks(self, sinks: tuple[int, ...]) -> "RoleKeys":
        """Return the roles where these keys are sinks besides the first, and nothing else."""
        if sinks and sinks not in self._by_sinks:
            are_sinks = torch.zeros(self.keep.shape[1], dtype=torch.bool)
            are_sinks[[*sinks]] = True
            others = {name: column & ~are_sinks for name, column in self.columns.items()}
            self._by_sinks[sinks] = replace(self, columns={**others, "sinks": are_sinks})
        return self._by_sinks.get(sinks, self)

    @cached_property
    def _by_sinks(self) -> "dict[tuple[int, ...], RoleKeys]":
        return {}

    def cells(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the indices of the cells of a role that is voted on: queries, from the first of
        `rows`, and keys. They are the same for the layers of a model."""
        if (name, rows.start) not in self._cells:
            query, key = self.voted[name][rows].nonzero(as_tuple=True)
            self._cells[name, rows.start] = query, key
        return self._cells[name, rows.start]

    @cached_property
    def _cells(self) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def far(self) -> Tensor:
        """The keys at no distance of `OFFSETS` that a query with a choice may look at, (n, Tk)."""
        allowed = self.keep & (self.choices > 1).unsqueeze(-1)
        if self.at is None:
            return allowed
        if self.away is not None:
            return allowed & (self.away.abs().amax(-1) > 1)
        offset = torch.arange(self.keep.shape[1]) - self.at.unsqueeze(-1)
        return allowed & ((offset < min(OFFSETS.values())) | (offset > max(OFFSETS.values())))

    @cached_property
    def chance(self) -> dict[str, Tensor]:
        """The probability that a query looks at a key of the role by chance, (n,).

        It is the larger of two: for a word drawn from those that the query may look at, and for a
        key drawn from these.
        """
        return {
            name: torch.maximum(
                self._words_among(cell) / self._words_among(self.keep).clamp(min=1),
                cell.sum(-1) / self.choices.clamp(min=1),
            )
            for name, cell in self.voted.items()
        }

    @cached_property
    def tested(self) -> "dict[str, RoleQueries]":
        """The queries on which each role is tested, those of `VOTED` first.

        They may look at a key of the role, and also have enough other keys. A role of fixed keys is
        tested on all queries with a choice.
        """
        allowed = {name: self.voted[name] for name in VOTED if name in self.voted}
        votes = {
            name: cells.any(-1) & (self.chance[name] <= MOST_CHANCE)
            for name, cells in allowed.items()
        }
        allowed |= {
            name: self.keep & self.columns[name] for name in COLUMNS if name in self.columns
        }
        chooses = self.choices > 1
        tested = {}
        for name, cells in allowed.items():
            queries = votes.get(name, chooses).nonzero().flatten()
            if len(queries):
                words = self.words[queries].unique(return_inverse=True)[1]
                uniform = (cells[queries].sum(-1) / self.choices[queries]).mean()
                tested[name] = RoleQueries(queries, words, float(uniform))
        return tested

    def _words_among(self, cells: Tensor) -> Tensor:
        """Count the different words among the keys of each query, (n,)."""
        seen = torch.zeros(len(cells), int(self.key_words.max()) + 1)
        return (seen.index_add_(1, self.key_words, cells.float()) > 0).sum(-1)
