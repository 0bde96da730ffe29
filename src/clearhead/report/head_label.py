"""The label of a head: words for where its weight lies, and the number behind them."""

import math
import re
import unicodedata
from collections.abc import Mapping

from ..results.report import NOT_NUMBERS

# A head is labelled by a group of keys if at least this share of its weight lies on the group, and
# at least so many times the share under uniform weights, which is large in a short text or in one
# full of commas.
MIN_SHARE, TIMES_UNIFORM = 0.3, 2.0
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


def label_of(
    shares: Mapping[str, float], uniform: Mapping[str, float], evenness: float
) -> tuple[str, float]:
    """The label of a head and its number, from its shares, those under uniform weights, and its
    entropy divided by the largest possible one."""
    large = {
        name: share
        for name, share in shares.items()
        if share >= max(MIN_SHARE, TIMES_UNIFORM * uniform.get(name, 0.0))
    }
    if math.isnan(evenness):
        return NOT_NUMBERS, evenness
    # An induction head has other shares for queries whose token did not occur before: these do not
    # name it.
    named = {name: share for name, share in large.items() if name in REPEAT_GROUPS} or large
    if named:
        group = max(named, key=lambda name: named[name])
        return LABELS[group], named[group]
    if evenness >= SPREAD:
        return "spread", evenness
    return ("sharp" if evenness <= SHARP else "mixed"), evenness
