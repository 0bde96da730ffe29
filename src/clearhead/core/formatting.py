"""Format numbers, sizes and tokens for the terminal, JSON and notebooks.

Tokens come from users and may hold any character. A label shows invisible characters, and no
character in it breaks the line or reorders it.
"""

import importlib
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

AXES = {
    "b": "sequence", "h": "head", "g": "key head", "q": "query", "k": "key", "d": "feature",
    "v": "value feature", "e": "embedding feature",
}  # fmt: skip

MAP_SIDE = 256  # cells on a side of a pooled map, which is about 600 pixels wide on a screen
PLURAL = {"query": "queries"}
UNITS = "", "k", "M", "G", "T", "P"


def number(x: float, decimals: int) -> str:
    """Write a number with `decimals` digits after the point, in exponential form from a million on.

    >>> number(-0.00001, 4), number(float("-inf"), 4), number(2.5e9, 2)
    ('0.0000', '−∞', '2.50e+09')
    """
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    text = f"{x:.{decimals}e}" if abs(x) >= 1e6 else f"{x:.{decimals}f}"
    return text.lstrip("-") if float(text) == 0 else text


def si(x: float) -> str:
    """Write a number with four digits and the prefix of its unit.

    >>> si(20), si(123456)
    ('20 ', '123.5 k')
    """
    unit = 0
    while x >= 1000 and unit < len(UNITS) - 1:
        x, unit = x / 1000, unit + 1
    return f"{x:.4g} {UNITS[unit]}"


def axis_size(size: int, letter: str) -> str:
    """Write the size of an axis with the name of the axis, given by its letter.

    >>> axis_size(5, "q"), axis_size(1, "k")
    ('5 queries', '1 key')
    """
    name = AXES.get(letter, letter)
    return f"{size} {name if size == 1 else PLURAL.get(name, name + 's')}"


def quantity(count: int, name: str) -> str:
    """Write a number of things, with commas.

    >>> quantity(1, "text"), quantity(20480, "token")
    ('1 text', '20,480 tokens')
    """
    return f"{count:,} {name}{'s' * (count != 1)}"


def aligned(
    rows: Sequence[Sequence[str]], between: str = "  ", width: int | None = None
) -> list[str]:
    """Align the cells of a table; a line for each row, with `between` between its cells.

    Columns that do not fit `width` characters are a table below, which repeats the first.

    >>> aligned([("a", "b"), ("long", "c")])
    ['a     b', 'long  c']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    tables = [[0]]
    for i in range(1, len(widths)):
        longest = sum(widths[j] + len(between) for j in [*tables[-1], i]) - len(between)
        if width is not None and longest > width and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(i)
    lines = []
    for table in tables:
        cells = ([row[i].ljust(widths[i]) for i in table] for row in rows)
        lines += ["", *(between.join(line).rstrip() for line in cells)]
    return lines[1:]


def ends(size: int, most: int) -> list[int | None]:
    """Return positions 0 to size - 1, or only the first and last `most`, around None.

    >>> ends(3, 4), ends(9, 4)
    ([0, 1, 2], [0, 1, None, 7, 8])
    """
    if size <= most:
        return list(range(size))
    first = (most + 1) // 2
    return [*range(first), None, *range(size - most + first, size)]


def evenly(size: int, most: int) -> list[int]:
    """Return at most `most` (two or more) evenly spaced positions, with both ends.

    >>> evenly(3, 4), evenly(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    if size <= most:
        return list(range(size))
    return [round(i * (size - 1) / (most - 1)) for i in range(most)]


def without_nan(value: Any, write: Callable[[float], object]) -> Any:
    """Replace NaN and infinity, which JSON lacks, by `write(x)` in nested dicts, lists and fields
    of dataclasses.

    >>> without_nan({"a": (1.0, float("inf"))}, str)
    {'a': [1.0, 'inf']}
    """
    if isinstance(value, dict) or is_dataclass(value):
        fields = value if isinstance(value, dict) else vars(value)
        return {name: without_nan(x, write) for name, x in fields.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(x, write) for x in value]
    return write(value) if isinstance(value, float) and not math.isfinite(value) else value


class Token(str):
    """A token as it was written in the text, with the space before it: ``" Mary"``.

    `raw` is its spelling in the vocabulary (``"ĠMary"``), and `id` its number there. `joined` is
    True if no space is between it and the token before, as in the pieces of one word. A token that
    is only a part of a character is written as bytes, and the token that completes the character
    as the character.
    """

    raw: str
    id: int
    joined: bool

    def __new__(cls, text: str, raw: str, id: int, joined: bool = False) -> "Token":
        token = super().__new__(cls, text)
        token.raw, token.id, token.joined = raw, id, joined
        return token

    def __reduce__(self) -> tuple[type, tuple[str, str, int, bool]]:
        return type(self), (str(self), self.raw, self.id, self.joined)


def spelled(tokens: Sequence[str]) -> dict[str, list[Any]]:
    """Return the vocabulary spelling and the id of each `Token`, for JSON; nothing for strings.

    >>> spelled([Token(" the", "Ġthe", 262)]), spelled([" the"])
    ({'raw_tokens': ['Ġthe'], 'token_ids': [262]}, {})
    """
    known = [token for token in tokens if isinstance(token, Token)]
    if not tokens or len(known) < len(tokens):
        return {}
    return {"raw_tokens": [x.raw for x in known], "token_ids": [x.id for x in known]}


def joined_text(tokens: Sequence[str]) -> str:
    """Join tokens to a text. A `Token` has its own space; other strings are joined with spaces.

    >>> joined_text([Token("The", "The", 464), Token(" cat", "Ġcat", 3797)]), joined_text("ab")
    ('The cat', 'a b')
    """
    known = all(isinstance(token, Token) for token in tokens)
    return ("" if known else " ").join(tokens)


def spellings(token: str) -> set[str]:
    """Return the names of a token that a user may pass: as written, as shown, as in the vocabulary.

    >>> sorted(spellings(Token(" the", "Ġthe", 262)))
    [' the', 'the', 'Ġthe']
    """
    return {str(token), visible_in_browser(token), getattr(token, "raw", str(token))}


WRITTEN = {"\n": "↵", "\t": "⇥"}  # which more fonts have than ␊ and ␉
REORDER = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u200e\u200f\u061c"  # direction marks, which have the bidirectional class of letters


def visible(token: str, longest: int = 16) -> str:
    """Write a token as a label of at most `longest` characters.

    Spaces at its ends become ␣. A character that is invisible, breaks the line or reorders it
    becomes its code point. The one space before the word of a `Token` is left out.

    >>> visible("a\\nb"), visible(" the"), visible("\\u202egnp"), visible("")
    ('a↵b', '␣the', '⟨202E⟩gnp', '∅')
    >>> visible(Token(" the", "Ġthe", 262)), visible(Token(" ", "Ġ", 220))
    ('the', '␣')
    """
    parts = _parts(token, joined=False)
    if len(parts) > longest:
        parts = [*parts[: longest - 1], "…"]
    return _on_own_base("".join(parts))


def visible_in_browser(token: str) -> str:
    """Write a token as a label of full length for a browser, which shortens labels itself.

    It keeps zero-width joiners, which browsers draw in emoji of families and in Indian scripts.
    """
    return _on_own_base("".join(_parts(token, joined=True)))


def _parts(token: str, joined: bool) -> list[str]:
    if isinstance(token, Token) and token[:1] == " " and token[1:2].strip():
        token = token[1:]
    body = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    after = len(token) - len(body) - before if body else 0
    return ["␣"] * before + [_written_out(char, joined) for char in body] + ["␣"] * after


def _on_own_base(label: str) -> str:
    """Put a circle before a combining mark that begins the label, so it joins no text before it."""
    if not label:
        return "∅"
    return "◌" + label if unicodedata.category(label[0]) in ("Mn", "Me", "Mc") else label


def _written_out(char: str, joined: bool) -> str:
    if char in WRITTEN:
        return WRITTEN[char]
    if ord(char) < 0x20:
        return chr(0x2400 + ord(char))  # ␀ ␛: the pictures of the control characters
    category = unicodedata.category(char)
    hidden = category in ("Cc", "Cs", "Zl", "Zp") or (
        category in ("Cf", "Cn", "Co")
        and (not joined or char in MARKS or unicodedata.bidirectional(char) in REORDER)
    )
    return f"⟨{ord(char):04X}⟩" if hidden else char


class ShownInNotebook:
    """A value that a notebook shows as HTML, which the explorer draws.

    The explorer is imported when a notebook shows the value, because modules below it must not
    import it.
    """

    def _repr_html_(self) -> str:
        cells = importlib.import_module("clearhead.views.cells")
        return str(cells.html_of(self))
