"""Choose the label of a head, which describes where it looks, and the label's number."""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .findings import NOT_NUMBERS

# A group of keys labels a head if at least this fraction of its weight is on the group. It must
# also be at least so many times the fraction under uniform weights, which is large in short texts
# and in texts with many commas.
MIN_SHARE, TIMES_UNIFORM = 0.3, 2.0
# In addition, at least this fraction of its queries must look there most, and the probability of
# this by chance must be at most one in a thousand.
MIN_QUERIES, LARGEST_CHANCE = 0.5, 1e-3
# These groups have few keys. In a short text, many queries may look at one of them because of its
# word and not its position, so these groups label a head only if it has so many queries.
FEW_KEYS, FEWEST_QUERIES = ("first", "separators"), 16
REPEAT_GROUPS = ("induction", "duplicate")  # means over queries whose token occurred before
SPREAD, SHARP = 0.8, 0.35  # entropy divided by the largest entropy that the mask allows
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
    """Return whether a token is punctuation, a line break, or special, like [SEP] and </s>.

    >>> [is_separator(t) for t in (",", "Ġ.", "[SEP]", "<|end|>", "Ċ", "##s", "cat")]
    [True, True, True, True, True, False, False]
    """
    body = token.removeprefix("##").strip("▁Ġ \t")
    if re.fullmatch(r"\[[A-Z_]+\]|</?[\w|]{1,30}>|<\|.{1,40}\|>|[Ċ\n\r]+", body):
        return True
    return bool(body) and all(unicodedata.category(char)[0] == "P" for char in body)


def separators(tokens: Sequence[str] | None, Tk: int, first: int) -> Tensor:
    """Return booleans for the keys that are punctuation or special, (Tk,).

    All are False if the tokens are unknown. The key `first` is False, because it is a separate
    group.
    """
    if tokens is None:
        return torch.zeros(Tk, dtype=torch.bool)
    flags = torch.tensor([is_separator(token) for token in tokens])
    flags[first] = False
    return flags


class Count(NamedTuple):
    """The number of `queries`, among `of`, whose largest weight is on a group of keys."""

    queries: int
    of: int


class Label(NamedTuple):
    """A label with its number, `evidence` and `withheld`, as in `findings.Head`."""

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
    """Choose the label of a head.

    A group of keys labels a head if it gets much of the weight, if most queries look there most,
    and if neither chance nor a short text explains this.

    Args:
        shares: the fraction of the head's weight on each group.
        uniform: the same for uniform weights.
        evenness: the entropy of the head divided by the largest possible entropy.
        counts: for each group, the number of queries that look there most. None: not counted.
    """
    if math.isnan(evenness):
        return Label(NOT_NUMBERS, evenness)
    large = {
        name: share
        for name, share in shares.items()
        if share >= max(MIN_SHARE, TIMES_UNIFORM * uniform.get(name, 0.0))
    }
    # The fractions of the other groups are over all queries, so a repeat group has precedence.
    named = {name: share for name, share in large.items() if name in REPEAT_GROUPS} or large
    withheld = ""
    for group in sorted(named, key=lambda name: -named[name]):
        count = (counts or {}).get(group)
        reason = count and _doubt(group, count, uniform.get(group, 0.0))
        if not reason:
            evidence = f"{count.queries} of {count.of} queries look there most." if count else ""
            return Label(LABELS[group], named[group], evidence, withheld)
        withheld = withheld or reason
    if evenness >= SPREAD:
        return Label("spread", evenness, "", withheld)
    return Label("sharp" if evenness <= SHARP else "mixed", evenness, "", withheld)


def _doubt(group: str, count: Count, chance: float) -> str:
    """Return why a group with much of the weight does not label a head; "" if it does."""
    name, fraction = LABELS[group], count.queries / max(1, count.of)
    if fraction < MIN_QUERIES:
        return f"Not called {name}: only {count.queries} of {count.of} queries look there most."
    if group in FEW_KEYS and count.of < FEWEST_QUERIES:
        return (
            f"Not called {name}: with only {count.of} queries it is unknown whether they look "
            "there because of the position or the word."
        )
    if chance_of(count, chance) > LARGEST_CHANCE:
        return f"Not called {name}: {count.queries} of {count.of} queries may be chance."
    return ""


def chance_of(count: Count, chance: float) -> float:
    """Return an upper bound of the probability that so many queries look there by chance.

    `chance` is the mean probability of one query (Hoeffding 1963, theorem 1).

    >>> round(chance_of(Count(6, 6), 0.5), 6), chance_of(Count(3, 6), 0.5)
    (0.015625, 1.0)
    """
    fraction = count.queries / max(1, count.of)
    if fraction <= chance or chance <= 0:
        return 1.0 if chance > 0 else 0.0
    rest = 1 - fraction
    missed = rest * math.log(rest / (1 - chance)) if rest > 0 else 0.0
    return math.exp(-count.of * (fraction * math.log(fraction / chance) + missed))
