"""Tokens are strangers' text; here they become labels that cannot hide, break or reorder a line."""

import unicodedata

REORDER = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u200e\u200f\u061c"  # marks of direction, which have no class of their own


def visible(token: str, longest: int = 16) -> str:
    """A token as a label: what would hide, break or reorder a line is written out.

    >>> visible("a\\nb"), visible(" the"), visible("\\u202egnp"), visible("")
    ('a␊b', '␣the', '⟨202E⟩gnp', '∅')
    """
    parts = _parts(token, joined=False)
    if len(parts) > longest:
        parts = [*parts[: longest - 1], "…"]
    return _held("".join(parts))


def in_browser(token: str) -> str:
    """The same for a browser, which cuts labels itself and draws what invisible characters join: a
    family, a letter of an Indian script."""
    return _held("".join(_parts(token, joined=True)))


def _parts(token: str, joined: bool) -> list[str]:
    body = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - len(body) - before if body else 0
    return ["␣"] * before + [_written_out(char, joined) for char in body] + ["␣"] * after


def _held(label: str) -> str:
    """The label, with something to hold a mark that would join the text of its neighbour."""
    if not label:
        return "∅"
    return "◌" + label if unicodedata.category(label[0]) in ("Mn", "Me", "Mc") else label


def _written_out(char: str, joined: bool) -> str:
    if ord(char) < 0x20:
        return chr(0x2400 + ord(char))  # ␀ ␉ ␊: the pictures of the control characters
    category = unicodedata.category(char)
    hidden = category in ("Cc", "Cs", "Zl", "Zp") or (
        category in ("Cf", "Cn", "Co")
        and (not joined or char in MARKS or unicodedata.bidirectional(char) in REORDER)
    )
    return f"⟨{ord(char):04X}⟩" if hidden else char
