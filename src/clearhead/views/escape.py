"""Tokens come from outside and may hold any character. Here they become labels in which nothing is
invisible, breaks the line or reorders it."""

import unicodedata

REORDER = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u200e\u200f\u061c"  # direction marks, whose bidirectional class is that of letters


def visible(token: str, longest: int = 16) -> str:
    """A token as a label of at most `longest` characters: spaces at its ends are shown, and what is
    invisible, breaks the line or reorders it is written as its code point.

    >>> visible("a\\nb"), visible(" the"), visible("\\u202egnp"), visible("")
    ('a␊b', '␣the', '⟨202E⟩gnp', '∅')
    """
    parts = _parts(token, joined=False)
    if len(parts) > longest:
        parts = [*parts[: longest - 1], "…"]
    return _held("".join(parts))


def visible_in_browser(token: str) -> str:
    """The same at full length for a browser, which shortens labels itself. It keeps zero-width
    joiners, which a browser draws: in emoji of families, in Indian scripts."""
    return _held("".join(_parts(token, joined=True)))


def _parts(token: str, joined: bool) -> list[str]:
    body = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - len(body) - before if body else 0
    return ["␣"] * before + [_written_out(char, joined) for char in body] + ["␣"] * after


def _held(label: str) -> str:
    """The label; a combining mark at its start gets a circle to stand on, so that it does not join
    the text before it."""
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
