"""In a model with cross-attention: of which text are the queries and keys of a call?"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..api.explain import wrong_count
from ..errors import BadValue

# The arguments by which modules are given another text, for cross-attention.
OTHER_TEXT = (
    "context",
    "memory",
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
)


@dataclass(frozen=True)
class CallSite:
    """The `module` that called attention, whether that was cross-attention, and the tokens of both
    sides, None where they are not known."""

    module: str
    cross_attention: bool
    query_tokens: tuple[str, ...] | None
    key_tokens: tuple[str, ...] | None


class TextTracker:
    """Follows a model from module to module. A module that is given another text does
    cross-attention; what runs inside such a module, or after one, belongs to the decoder."""

    def __init__(
        self, tokens: Sequence[str] | None, decoder_tokens: Sequence[str] | None = None
    ) -> None:
        given = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        self.tokens = {n: None if x is None else tuple(map(str, x)) for n, x in given.items()}
        self.lengths: dict[str, list[int]] = {"tokens": [], "decoder_tokens": []}
        self.stack: list[tuple[str, bool]] = []  # modules that run, and whether given another text
        self.in_decoder = False

    def enter(
        self, name: str, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self.stack.append((name, _is_given_another_text(module, args, kwargs)))

    def leave(self, *_: object) -> None:
        self.stack.pop()

    def call_site(self, Tq: int, Tk: int) -> CallSite:
        """The site of the call that runs now, of Tq queries and Tk keys."""
        name, crosses = self.stack[-1] if self.stack else ("", False)
        self.in_decoder = self.in_decoder or crosses
        in_decoder = self.in_decoder or any(other for _, other in self.stack)
        query_text = "decoder_tokens" if in_decoder else "tokens"
        key_text = "tokens" if crosses else query_text
        return CallSite(name, crosses, self._tokens(query_text, Tq), self._tokens(key_text, Tk))

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


def _is_given_another_text(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    try:
        names = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward that is not written in Python has no signature
        names = ()
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    own = next(iter(tensors.values()), None)
    return any(name in tensors and tensors[name] is not own for name in OTHER_TEXT)
