"""The vocabulary of the included model: words and their ids.

A word outside the vocabulary gets the id of ``<unknown>`` and is marked, so that views can show the
mark. Letters: T tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.errors import BadValue
from ..nn.tokenize import tokenize

UNKNOWN, END = "<unknown>", "<end>"


class Encoded(NamedTuple):
    """A text as ids: T tokens as written, T ids, and T booleans for unknown words."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    unknown: tuple[bool, ...]

    def labels(self) -> list[str]:
        """Return the tokens for views, unknown ones marked: ``zebra(?)``."""
        return [f"{t}(?)" if u else t for t, u in zip(self.tokens, self.unknown, strict=True)]


@dataclass(frozen=True)
class Vocabulary:
    """The words of a model, in lower case; the first two are ``<unknown>`` and ``<end>``.

    >>> v = Vocabulary.of(["the", "owl"])
    >>> v.encode("The zebra")
    Encoded(tokens=('The', 'zebra'), ids=(3, 0), unknown=(False, True))
    """

    words: tuple[str, ...]
    number: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", {word: i for i, word in enumerate(self.words)})
        if self.words[:2] != (UNKNOWN, END) or len(self.number) != len(self.words):
            gave = f"Vocabulary got {len(self.words)} words, {len(self.number)} of them different."
            rule = f"it starts with {UNKNOWN} and {END}, and its words are unique."
            raise BadValue(gave, rule, "use Vocabulary.of(words), which ensures both.")

    @classmethod
    def of(cls, words: Iterable[str]) -> "Vocabulary":
        """Return the vocabulary of these words, in lower case and alphabetical order."""
        return cls((UNKNOWN, END, *sorted({word.lower() for word in words} - {UNKNOWN, END})))

    @classmethod
    def of_text(cls, text: str, most: int = 1000) -> "Vocabulary":
        """Return the vocabulary of the `most` most frequent words; ties go to the first."""
        return cls.of(word for word, _ in Counter(tokenize(text.lower())).most_common(most))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str | Sequence[str]) -> Encoded:
        """Convert a text, or its tokens, to ids. Raises `BadValue` for a text without words."""
        tokens = tuple(tokenize(text) if isinstance(text, str) else text)
        if not tokens:
            rule = "the model reads at least one word."
            hint = "pass some words, for example 'Once upon a time there was a girl.'."
            raise BadValue(f"The text {text!r} has no words.", rule, hint)
        ids = tuple(self.number.get(token.lower(), 0) for token in tokens)
        return Encoded(tokens, ids, tuple(i == 0 for i in ids))
