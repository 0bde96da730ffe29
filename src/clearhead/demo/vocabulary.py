"""Words and their numbers.

A word outside the vocabulary gets the number of ``<unknown>`` and is marked, so that views can show
the mark. Letters: T tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import BadValue
from ..nn.tokenize import tokenize

UNKNOWN, END = "<unknown>", "<end>"


class Encoded(NamedTuple):
    """A text as numbers: T tokens as written, T ids, and which of them are unknown."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    unknown: tuple[bool, ...]

    def labels(self) -> list[str]:
        """The tokens to show, unknown ones marked: ``zebra(?)``."""
        return [f"{t}(?)" if u else t for t, u in zip(self.tokens, self.unknown, strict=True)]


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows, lower case; the first two stand for the unknown and for the end.

    >>> v = Vocabulary.of(["the", "owl"])
    >>> v.encode("The zebra")
    Encoded(tokens=('The', 'zebra'), ids=(3, 0), unknown=(False, True))
    """

    words: tuple[str, ...]
    number: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", {word: i for i, word in enumerate(self.words)})
        if self.words[:2] != (UNKNOWN, END) or len(self.number) != len(self.words):
            raise BadValue(
                f"A vocabulary was given {len(self.words)} words, {len(self.number)} different.",
                f"it starts with {UNKNOWN} and {END}, and every word is there once.",
                "use Vocabulary.of(words), which does both.",
            )

    @classmethod
    def of(cls, words: Iterable[str]) -> "Vocabulary":
        """These words, lower case, each once, in alphabetical order."""
        return cls((UNKNOWN, END, *sorted({word.lower() for word in words} - {UNKNOWN, END})))

    @classmethod
    def of_text(cls, text: str, most: int = 1000) -> "Vocabulary":
        """The `most` most frequent words of a text; of equally frequent ones, the first."""
        return cls.of(word for word, _ in Counter(tokenize(text.lower())).most_common(most))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str | Sequence[str]) -> Encoded:
        """A text, or its tokens, as numbers. Raises `BadValue` for a text without words."""
        tokens = tuple(tokenize(text) if isinstance(text, str) else text)
        if not tokens:
            raise BadValue(
                f"The text {text!r} has no words.",
                "the model reads at least one word.",
                "pass some words, for example 'Once upon a time there was a girl.'.",
            )
        ids = tuple(self.number.get(token.lower(), 0) for token in tokens)
        return Encoded(tokens, ids, tuple(i == 0 for i in ids))
