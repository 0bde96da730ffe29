"""The label of a head: words for where its weight lies, and the number behind them."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .findings import NOT_NUMBERS

# A head is labelled by a group of keys if at least this share of its weight lies on the group, and
# at least so many times the share under uniform weights, which is large in a short text or in one
# full of commas.
MIN_SHARE, TIMES_UNIFORM = 0.3, 2.0
# And if at least this share of its queries look there most, and chance explains that in at most one
# head of a thousand.
MIN_QUERIES, LARGEST_CHANCE = 0.5, 1e-3
# These groups have few keys: in a short text, many queries may look at one of them for its word and
# not for its place. So they name a head only if it has so many queries.
FEW_KEYS, FEWEST_QUERIES = ("first", "separators"), 16
REPEAT_GROUPS = ("induction", "duplicate")  # means over those queries whose token occurred before
SPREAD, SHARP = 0.8, 0.35  # entropy divided by the largest that the mask allows
LABELS = {
    "induction": "induction",
    "duplicate": "duplicate token",
    "previous": "previous token",
    "next": "next token",
    "same": "same token",
    "first": "first token (sink)",
    "separators": "separators",
    "sink": "nothing (sink logit)",
}


def is_separator(token: str) -> bool:
    """Whether a token is punctuation, a line's end, or special, like [SEP] and </s>.

    >>> [is_separator(t) for t in (",", "Ġ.", "[SEP]", "<|end|>", "Ċ", "##s", "cat")]
    [True, True, True, True, True, False, False]
    """
    body = token.removeprefix("##").strip("▁Ġ \t")
    if re.fullmatch(r"\[[A-Z_]+\]|</?[\w|]{1,30}>|<\|.{1,40}\|>|[Ċ\n\r]+", body):
        return True
    return bool(body) and all(unicodedata.category(char)[0] == "P" for char in body)


def separators(tokens: Sequence[str] | None, Tk: int, first: int) -> Tensor:
    """Which keys are punctuation or special, (Tk,); none if the tokens are not known. The key
    `first` is not, as it is a group of its own."""
    if tokens is None:
        return torch.zeros(Tk, dtype=torch.bool)
    found = torch.tensor([is_separator(token) for token in tokens])
    found[first] = False
    return found


class Count(NamedTuple):
    """Of `of` queries, `queries` have their largest weight on a group of keys."""

    queries: int
    of: int


class Label(NamedTuple):
    """A label and the number behind it; for how many queries it speaks; and why a label that the
    number alone would give was withheld, "" if none was."""

    label: str
    number: float
    evidence: str = ""
    withheld: str = ""


def label_of(
    shares: Mapping[str, float],
    uniform: Mapping[str, float],
    evenness: float,
    counts: Mapping[str, Count] | None = None,
) -> Label:
    """The label of a head, from its shares of weight, those under uniform weights, its entropy
    divided by the largest possible one, and `counts` of its queries by group; None: not counted.

    A group names a head if it holds much of its weight, if most of its queries look there most, and
    if neither chance nor the shortness of the text explains that.
    """
    if math.isnan(evenness):
        return Label(NOT_NUMBERS, evenness)
    large = {
        name: share
        for name, share in shares.items()
        if share >= max(MIN_SHARE, TIMES_UNIFORM * uniform.get(name, 0.0))
    }
    # An induction head has other shares for queries whose token did not occur before: these do not
    # name it.
    named = {name: share for name, share in large.items() if name in REPEAT_GROUPS} or large
    withheld = ""
    for group in sorted(named, key=lambda name: -named[name]):
        count = (counts or {}).get(group)
        reason = count and _doubt(group, count, uniform.get(group, 0.0))
        if not reason:
            evidence = f"So look {count.queries} of {count.of} queries." if count else ""
            return Label(LABELS[group], named[group], evidence, withheld)
        withheld = withheld or reason
    if evenness >= SPREAD:
        return Label("spread", evenness, "", withheld)
    return Label("sharp" if evenness <= SHARP else "mixed", evenness, "", withheld)


def _doubt(group: str, count: Count, chance: float) -> str:
    """Why a group does not name a head although it holds much of its weight; "" if it does."""
    name, share = LABELS[group], count.queries / max(1, count.of)
    if share < MIN_QUERIES:
        return f"Not called {name}: {count.queries} of {count.of} queries look there most."
    if group in FEW_KEYS and count.of < FEWEST_QUERIES:
        return (
            f"Not called {name}: with {count.of} queries one cannot tell whether they look there "
            "for the place or for the word."
        )
    if chance_of(count, chance) > LARGEST_CHANCE:
        return f"Not called {name}: {count.queries} of {count.of} queries may be chance."
    return ""


def chance_of(count: Count, chance: float) -> float:
    """At most how probable it is that so many of the queries look there by chance, if one does with
    probability `chance` on average (Hoeffding 1963, theorem 1).

    >>> round(chance_of(Count(6, 6), 0.5), 6), chance_of(Count(3, 6), 0.5)
    (0.015625, 1.0)
    """
    share = count.queries / max(1, count.of)
    if share <= chance or chance <= 0:
        return 1.0 if chance > 0 else 0.0
    missed = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return math.exp(-count.of * (share * math.log(share / chance) + missed))
