"""A corpus of needles: random tokens that are hidden in texts, and repeated at their ends."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadValue, as_count
from .basic import NEAR
from .corpus import pieces
from .long import CUE
from .reader import Reader
from .texts import Text, read_texts


@dataclass(frozen=True)
class Needles:
    """Contexts with a needle at a random depth, which their end repeats.

    A needle has `tokens` different random tokens that its haystack does not have. The first 4 of
    them at the end are the question; nothing but the needle predicts the others. So one forward
    pass measures retrieval, with the metrics `copied` and `retrieval` (Wu et al. 2024, arXiv
    2404.15574, has sentences as needles, and generates). The haystacks are pieces of `texts`, as
    long as a context allows, again from the first one if there are fewer. The seed of the survey
    draws needles and depths.

    Attributes:
        texts: the texts of the haystacks, as in `survey`.
        count: the number of contexts.
        tokens: the tokens of a needle.
    """

    texts: "str | Path | Iterable[str | Path]"
    count: int = 100
    tokens: int = 16

    def __post_init__(self) -> None:
        hint = "pass for example Needles(texts, count=100, tokens=16)."
        as_count("count", self.count, "a survey has texts.", hint, least=1)
        rule = f"a needle has the {CUE} tokens of the question, and others."
        as_count("tokens", self.tokens, rule, hint, least=CUE + 1)

    def described(self) -> dict[str, Any]:
        """Return the settings, for the manifest. The shards have the tokens."""
        return {"needles": {"count": self.count, "tokens": self.tokens}}

    def drawn(self, reader: Reader, context: int, seed: int) -> Iterator[Text]:
        """Yield the texts.

        Raises `BadValue` if a needle does not fit into a context, for short texts, and for a
        vocabulary with few other tokens.
        """
        before, after = reader.around
        size = context - len(before) - len(after) - 2 * self.tokens
        if size <= NEAR:
            raise BadValue(
                f"Needles has tokens={self.tokens}, and context={context}.",
                f"a context has a needle twice, and more than {NEAR} tokens between them.",
                "pass fewer tokens, or a larger context.",
            )
        haystacks = list(self._haystacks(reader, size))
        if not haystacks:
            raise BadValue(
                f"No text of Needles has {size} tokens.",
                f"a haystack fills a context of {context} tokens.",
                "pass longer texts, or a smaller context.",
            )
        generator = random.Random(seed)
        words = {*range(len(reader.words))} - {*before, *after}
        for number in range(self.count):
            haystack = haystacks[number % len(haystacks)]
            others = sorted(words - {*haystack})
            if len(others) < self.tokens:
                raise BadValue(
                    f"Needles has tokens={self.tokens}, and a haystack leaves {len(others)} of the "
                    f"{len(words)} tokens of the vocabulary.",
                    "the tokens of a needle are not in its haystack.",
                    "pass fewer tokens, or a smaller context.",
                )
            needle = generator.sample(others, self.tokens)
            at = generator.randrange(size - NEAR)
            ids = (*haystack[:at], *needle, *haystack[at:], *needle)
            yield Text(f"needle {number} at {at}", None, ids=ids)

    def _haystacks(self, reader: Reader, size: int) -> Iterator[list[int]]:
        """Yield the pieces of the texts, each of `size` tokens, as many as are needed."""
        left = self.count
        for text in read_texts(self.texts):
            ids = text.ids if text.content is None else reader.encode(text.content)
            for piece in pieces(ids, size):
                if len(piece) == size and left:
                    left -= 1
                    yield list(piece)
            if not left:
                return
