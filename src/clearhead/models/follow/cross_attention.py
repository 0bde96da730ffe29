"""Find the texts of the queries and keys of a call, in a model with cross-attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import BadValue
from ...core.functional.explain import label, wrong_count
from ...core.masks.text_positions import Positions
from ...core.problem.problem import Problem
from .picture import Picture
from .text_stack import TextStack


@dataclass(frozen=True)
class CallSite:
    """The context of an attention call in a model and its texts.

    `module` is the name of the calling module. The tokens are None if unknown, and `at` has the
    positions of the call in its texts. `in_decoder` is whether its queries are the decoder's text.
    `picture` is the image whose patches are its tokens, or None.
    """

    module: str
    cross_attention: bool
    query_tokens: tuple[str, ...] | None
    key_tokens: tuple[str, ...] | None
    at: Positions
    in_decoder: bool = False
    picture: Picture | None = None


class TextTracker:
    """Tracks the texts of a model from module to module.

    A module to which another text is passed does cross-attention. Calls inside such a module, or
    after one, belong to the decoder.
    """

    def __init__(
        self, tokens: Sequence[str] | None, decoder_tokens: Sequence[str] | None = None,
        stack: TextStack | None = None,
    ) -> None:  # fmt: skip
        texts = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        self.tokens = {n: None if x is None else tuple(map(label, x)) for n, x in texts.items()}
        self.lengths: dict[str, list[int]] = {"tokens": [], "decoder_tokens": []}
        self.stack = TextStack() if stack is None else stack
        self.in_decoder = False

    def call_site(self, problem: Problem) -> CallSite:
        """Return the site of the current call."""
        running = self.stack.running
        crosses = self.stack.crosses
        self.in_decoder = self.in_decoder or crosses
        in_decoder = self.in_decoder or self.stack.in_decoder
        query_text = "decoder_tokens" if in_decoder else "tokens"
        key_text = "tokens" if crosses else query_text
        picture = None
        if self.stack.pictures is not None and running:
            picture = self.stack.pictures.of_call(running[0], problem.Tq, problem.Tk)
        return CallSite(
            running[-1].name if running else "",
            crosses,
            self._tokens(query_text, problem.Tq, picture),
            self._tokens(key_text, problem.Tk, picture),
            self.stack.positions(problem),
            in_decoder,
            picture,
        )

    def _tokens(
        self, name: str, length: int, picture: Picture | None = None
    ) -> tuple[str, ...] | None:
        self.lengths[name].append(length)
        tokens = self.tokens[name]
        if tokens is None or len(tokens) != length:
            return None if picture is None else picture.tokens
        if picture is None or not picture.in_text:
            return tokens
        at = picture.patches
        return tokens[: at.start] + picture.tokens[at] + tokens[at.stop :]

    def check_tokens(self) -> None:
        """Raise `BadValue` if the number of `tokens` or `decoder_tokens` fits no call."""
        for name, tokens in self.tokens.items():
            if tokens is None or len(tokens) in self.lengths[name]:
                continue
            if name == "tokens" and len(tokens) in self.lengths["decoder_tokens"]:
                gave = f"tokens has {len(tokens)} entries, the length of the decoder's text."
                rule = "tokens are those of the encoder's text, decoder_tokens the decoder's."
                raise BadValue(gave, rule, "pass them as decoder_tokens=.")
            if self.lengths[name]:
                raise wrong_count(name, len(tokens), self.lengths[name][0])
            rule = "these are tokens of a decoder, and this model made no cross-attention call."
            raise BadValue(f"{name} has {len(tokens)} entries.", rule, "leave them out.")
