"""What a model that reads text offers: a transformers checkpoint, or the model that ships."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ..trace import Trace
from .report.result import Report


class Remark(NamedTuple):
    """A sentence about a text, and the head of a layer's `trace` that shows it; None where the
    sentence is about no head."""

    sentence: str
    trace: Trace | None = None
    layer: int = 0
    head: int = 0


class TextModel(Protocol):
    """A model with its tokenizer. `hf.Checkpoint` and `demo.Storyteller` are of this kind.

    `path` is its folder or file, None if it came with clearhead. `module` runs on a text, and
    `predictor` gives logits of the next token, None if the model was not trained to. `depth` is the
    number of layers, None if unknown; `words` has the token of each id. `is_small` says that it
    runs so quickly that `clearhead look` measures the effects of its heads unasked.
    """

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def predictor(self) -> nn.Module | None: ...
    @property
    def depth(self) -> int | None: ...
    @property
    def words(self) -> Sequence[str]: ...
    @property
    def is_small(self) -> bool: ...

    def tokens_and_inputs(self, text: str) -> tuple[list[str], dict[str, Tensor]]:
        """The tokens of a text, and the inputs of `module` for it."""

    def run(self, inputs: dict[str, Tensor], *, predict: bool = False) -> Any:
        """What `module` returns for inputs; with `predict` the `predictor`, if there is one."""

    def explain(self, text: str, layer: int = 0) -> Trace:
        """The `Trace` of one layer on a text."""

    def annotate(self, report: Report) -> Report:
        """A report on this model with what is known of it besides: measured labels, unknown words,
        the model itself for the page."""

    def remarks(self, text: str) -> Sequence[Remark]:
        """What else there is to say of a text."""
