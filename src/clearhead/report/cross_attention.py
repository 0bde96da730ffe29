"""Of which text a call's queries and keys are, in a model that looks from one into another."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..api.explain import wrong_count
from ..errors import BadValue

# What modules call the other text that they are given.
OTHER = (
    "context",
    "memory",
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
)


@dataclass(frozen=True)
class Place:
    """Where a call was asked: in which `module`; `crosses` says that its keys are of another text
    than its queries. `queries` and `keys` are what they say, None where nobody told."""

    module: str
    crosses: bool
    queries: tuple[str, ...] | None
    keys: tuple[str, ...] | None


class Texts:
    """Follows a model from module to module. A module that is given another text crosses over to
    it, and what runs inside of one, or after one, decodes."""

    def __init__(
        self, tokens: Sequence[str] | None, decoder_tokens: Sequence[str] | None = None
    ) -> None:
        given = {"tokens": tokens, "decoder_tokens": decoder_tokens}
        self.tokens = {n: None if x is None else tuple(map(str, x)) for n, x in given.items()}
        self.sizes: dict[str, list[int]] = {"tokens": [], "decoder_tokens": []}
        self.inside: list[tuple[str, bool]] = []
        self.crossed = False

    def enter(
        self, name: str, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self.inside.append((name, _is_given_another(module, args, kwargs)))

    def leave(self, *_: object) -> None:
        self.inside.pop()

    def place(self, Tq: int, Tk: int) -> Place:
        """Of the call that is asked now, by so many queries of so many keys."""
        name, crosses = self.inside[-1] if self.inside else ("", False)
        self.crossed = self.crossed or crosses
        decodes = self.crossed or any(other for _, other in self.inside)
        asking = "decoder_tokens" if decodes else "tokens"
        looked_at = "tokens" if crosses else asking
        return Place(name, crosses, self._told(asking, Tq), self._told(looked_at, Tk))

    def _told(self, name: str, size: int) -> tuple[str, ...] | None:
        self.sizes[name].append(size)
        tokens = self.tokens[name]
        return tokens if tokens is not None and len(tokens) == size else None

    def must_fit(self) -> None:
        """Raise `BadValue` for tokens that were given and label no side of any call."""
        for name, tokens in self.tokens.items():
            if tokens is None or len(tokens) in self.sizes[name]:
                continue
            if name == "tokens" and len(tokens) in self.sizes["decoder_tokens"]:
                raise BadValue(
                    f"tokens has {len(tokens)} entries, as many as the text that looks into "
                    "another has.",
                    "tokens are those of the other text, decoder_tokens of the one that looks.",
                    "pass them as decoder_tokens=.",
                )
            if self.sizes[name]:
                raise wrong_count(name, len(tokens), self.sizes[name][0])
            raise BadValue(
                f"{name} has {len(tokens)} entries.",
                "they are what a text says that looks into another, and this model has no such.",
                "leave them out.",
            )


def _is_given_another(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    try:
        names = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # what is not written in Python has no names to tell
        names = ()
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    own = next(iter(tensors.values()), None)
    return any(name in tensors and tensors[name] is not own for name in OTHER)
