"""What a model that reads text offers: a transformers checkpoint, or the model that ships."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from ..trace import Trace


class TextModel(Protocol):
    """A model with its tokenizer. `hf.Checkpoint` and `demo.Storyteller` are of this kind.

    `module` runs on a text, and `predictor` gives logits of the next token, None if the model was
    not trained to. `depth` is the number of layers, None if unknown; `words` has the token of each
    id.
    """

    @property
    def name(self) -> str: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def predictor(self) -> nn.Module | None: ...
    @property
    def depth(self) -> int | None: ...
    @property
    def words(self) -> Sequence[str]: ...

    def tokens_and_inputs(self, text: str) -> tuple[list[str], dict[str, Tensor]]:
        """The tokens of a text, and the inputs of `module` for it."""

    def explain(self, text: str, layer: int = 0) -> Trace:
        """The `Trace` of one layer on a text."""
