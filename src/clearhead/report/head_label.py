"""What a head is called: words for where its weight lies, and the number behind them."""

import re
import unicodedata
from collections.abc import Mapping

# A head is named after the share of its weight that lies on one group of keys: 0.3, and twice what
# even weights would give: below that, a short text or a text full of commas names itself.
SHARE, CHANCE = 0.3, 2.0
REPEATS = ("induction", "duplicate")  # whose shares are of the queries that have such a place
SPREAD, SHARP = 0.8, 0.35  # entropy as a share of the most that the mask allows
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


def separates(token: str) -> bool:
    """Whether a token is punctuation, a line's end, or special, like [SEP] and </s>.

    >>> [separates(t) for t in (",", "Ġ.", "[SEP]", "<|end|>", "Ċ", "##s", "cat")]
    [True, True, True, True, True, False, False]
    """
    body = token.removeprefix("##").strip("▁Ġ \t")
    if re.fullmatch(r"\[[A-Z_]+\]|</?[\w|]{1,30}>|<\|.{1,40}\|>|[Ċ\n\r]+", body):
        return True
    return bool(body) and all(unicodedata.category(char)[0] == "P" for char in body)


def label_of(
    shares: Mapping[str, float], chance: Mapping[str, float], evenness: float
) -> tuple[str, float]:
    telling = {
        name: share
        for name, share in shares.items()
        if share >= max(SHARE, CHANCE * chance.get(name, 0.0))
    }
    # A head that looks to where its token stood before rests elsewhere where it did not stand.
    named = {name: share for name, share in telling.items() if name in REPEATS} or telling
    if named:
        group = max(named, key=lambda name: named[name])
        return LABELS[group], named[group]
    if evenness >= SPREAD:
        return "spread", evenness
    return ("sharp" if evenness <= SHARP else "mixed"), evenness
