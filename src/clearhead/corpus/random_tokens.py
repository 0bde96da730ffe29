"""Corpora of random tokens: repeated, where no text can mislead, or hidden in texts as needles."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import BadValue, as_count
from ..models.report.repeated_tokens import FEWEST_TOKENS
from .basic import NEAR
from .long import CUE
from .reader import Reader
from .texts import Sources, Text, read_texts


@dataclass(frozen=True)
class RandomRepeats:
    """Texts of `tokens` different random tokens, and then the same tokens again.

    Every token of the second half has one earlier copy. In a survey of these texts, the metrics
    `induction`, `duplicate` and `previous` are scores that no content explains (Olsson et al. 2022,
    arXiv 2209.11895: prefix matching; TransformerLens). The seed of the survey draws the tokens,
    from all of the vocabulary but those that the tokenizer adds around a text.
    """

    texts: int = 100
    tokens: int = 50

    def __post_init__(self) -> None:
        hint = "pass for example RandomRepeats(texts=100, tokens=50)."
        as_count("texts", self.texts, "a survey has texts.", hint, least=1)
        rule = f"at least {FEWEST_TOKENS} tokens are repeated."
        as_count("tokens", self.tokens, rule, hint, least=FEWEST_TOKENS)

    def described(self) -> dict[str, Any]:
        """Return the settings, for the manifest."""
        return {"random repeats": asdict(self)}

    def drawn(self, reader: Reader, context: int, seed: int) -> Iterator[Text]:
        """Yield the texts. Raises `BadValue` if a text does not fit into a context."""
        before, after = reader.around
        known = sorted({*range(len(reader.words))} - {*before, *after})
        most = min((context - len(before) - len(after)) // 2, len(known))
        if self.tokens > most:
            gave = f"{self.tokens} random tokens were requested, of {len(known)} in the vocabulary."
            rule = f"a context of {context} tokens has them twice, and they are different ones."
            raise BadValue(gave, rule, f"repeat at most {most} tokens, or pass a larger context.")
        generator = random.Random(seed)
        for number in range(self.texts):
            half = generator.sample(known, self.tokens)
            yield Text(f"random {number}", None, ids=(*half, *half))


@dataclass(frozen=True)
class Needles:
    """Contexts with a needle at a random depth, which their end repeats.

    A needle has `tokens` different random tokens that its haystack does not have. The first 4 of
    them at the end are the question; nothing but the needle predicts the others. So one forward
    pass measures retrieval, with the metrics `copied` and `retrieval` (Wu et al. 2024, arXiv
    2404.15574, has sentences as needles, and generates). The haystacks are pieces of `texts`, as
    long as a context allows, again from the first one if there are fewer. A token that follows the
    same 4 tokens as earlier in its haystack is left out, so that only needles are copied. The seed
    of the survey draws needles and depths.

    Attributes:
        texts: the texts of the haystacks, as in `survey`.
        count: the number of contexts.
        tokens: the tokens of a needle.
    """

    texts: Sources
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
            gave = f"A needle has {self.tokens} tokens, and a context {context}."
            rule = f"a context has a needle twice, and more than {NEAR} tokens between them."
            raise BadValue(gave, rule, "pass fewer tokens, or a larger context.")
        unread: list[Text] = []
        haystacks = list(self._haystacks(reader, size, unread))
        if not haystacks:
            gave = f"No text for needles has {size} tokens without repetitions."
            rule = f"a haystack fills a context of {context} tokens."
            raise BadValue(gave, rule, "pass longer texts, or a smaller context.")
        generator = random.Random(seed)
        words = {*range(len(reader.words))} - {*before, *after}
        for number in range(self.count):
            haystack = haystacks[number % len(haystacks)]
            others = sorted(words - {*haystack})
            if len(others) < self.tokens:
                gave = f"A haystack leaves {len(others)} of {len(words)} tokens of the vocabulary."
                rule = f"the {self.tokens} tokens of a needle are not in its haystack."
                raise BadValue(gave, rule, "pass fewer tokens, or a smaller context.")
            needle = generator.sample(others, self.tokens)
            # After another token than at the end: so no run with it is repeated.
            places = [i for i in range(size - NEAR) if not i or haystack[i - 1] != haystack[-1]]
            at = generator.choice(places)
            ids = (*haystack[:at], *needle, *haystack[at:], *needle)
            yield Text(f"needle {number} at {at}", None, ids=ids)
        yield from unread

    def _haystacks(self, reader: Reader, size: int, unread: list[Text]) -> Iterator[list[int]]:
        """Yield the pieces of the texts, each of `size` tokens, as many as are needed.

        Texts that cannot be read are added to `unread`.
        """
        left = self.count
        for text in read_texts(self.texts):
            if text.reason:
                unread.append(text)
            ids = iter(text.ids if text.content is None else reader.encode([text.content])[0])
            while left and len(piece := without_copies(ids, size)) == size:
                left -= 1
                yield piece
            if not left:
                return


def without_copies(ids: Iterator[int], size: int) -> list[int]:
    """Return the first `size` tokens, without those that repeat a run of `CUE` + 1 tokens.

    >>> without_copies(iter([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]), 10)
    [1, 2, 3, 4, 5, 1, 2, 3, 4, 6]
    """
    tokens: list[int] = []
    runs: set[tuple[int, ...]] = set()
    while len(tokens) < size and (token := next(ids, None)) is not None:
        run = (*tokens[-CUE:], token)
        if run not in runs:
            runs.add(run)
            tokens.append(token)
    return tokens
