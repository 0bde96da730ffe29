"""A corpus of random tokens that are repeated, where no text can mislead: `RandomRepeats`."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import BadValue, as_count
from ..models.report.probe import FEWEST_TOKENS
from .reader import Reader
from .texts import Text


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
            raise BadValue(
                f"{self.tokens} random tokens were requested.",
                f"a context of {context} tokens has them twice, and they are different ones of the "
                f"{len(known)} in the vocabulary.",
                f"repeat at most {most} tokens, or pass a larger context.",
            )
        generator = random.Random(seed)
        for number in range(self.texts):
            half = generator.sample(known, self.tokens)
            yield Text(f"random {number}", None, ids=(*half, *half))
