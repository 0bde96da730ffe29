"""In a model with cross-attention: of which text are the queries and keys of a call?"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import BadValue
from ...functional.explain import wrong_count
from ...masks.text_positions import Positions
from ...problem.problem import Problem
from ..text_stack import TextStack


@dataclass(frozen=True)
class CallSite:
    """The `module` that called attention, whether that was cross-attention, the tokens of both
    sides, None where they are not known, and where the call stands in their texts."""

    module: str
    cross_attention: bool
    query_tokens: tuple[str, ...] | None
    key_tokens: tuple[str, ...] | None
    at: Positions


class TextTracker:
    """Follows a model from module to module. A module that is given another text does
    cross-attention; what runs inside such a module, or after one, belongs to the decoder."""

    def __init__(
        self, tokens: Sequence[str] | None, decoder_tokens: Sequence[str] | None = None
    ) -> None:
        given = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        self.tokens = {n: None if x is None else tuple(map(str, x)) for n, x in given.items()}
        self.lengths: dict[str, list[int]] = {"tokens": [], "decoder_tokens": []}
        self.stack = TextStack()
        self.in_decoder = False

    def call_site(self, problem: Problem) -> CallSite:
        """The site of the call that runs now."""
        running = self.stack.running
        crosses = self.stack.crosses
        self.in_decoder = self.in_decoder or crosses
        query_text = "decoder_tokens" if self.in_decoder or self.stack.in_decoder else "tokens"
        key_text = "tokens" if crosses else query_text
        return CallSite(
            running[-1].name if running else "",
            crosses,
            self._tokens(query_text, problem.Tq),
            self._tokens(key_text, problem.Tk),
            self.stack.positions(problem),
        )

    def _tokens(self, name: str, length: int) -> tuple[str, ...] | None:
        self.lengths[name].append(length)
        tokens = self.tokens[name]
        return tokens if tokens is not None and len(tokens) == length else None

    def check_tokens(self) -> None:
        """Raise `BadValue` for tokens that were given and fit no side of any call."""
        for name, tokens in self.tokens.items():
            if tokens is None or len(tokens) in self.lengths[name]:
                continue
            if name == "tokens" and len(tokens) in self.lengths["decoder_tokens"]:
                raise BadValue(
                    f"tokens has {len(tokens)} entries, as many as the text that looks into "
                    "another has.",
                    "tokens are those of the other text, decoder_tokens of the one that looks.",
                    "pass them as decoder_tokens=.",
                )
            if self.lengths[name]:
                raise wrong_count(name, len(tokens), self.lengths[name][0])
            raise BadValue(
                f"{name} has {len(tokens)} entries.",
                "they are the tokens of a text that looks into another, and no call of this model "
                "does that.",
                "leave them out.",
            )
