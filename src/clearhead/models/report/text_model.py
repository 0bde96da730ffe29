"""The protocol of models that read text: a transformers checkpoint, or the included model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ...core.functional.trace import Trace
from .result import Report


class Remark(NamedTuple):
    """A sentence about a text, and the `trace` of the layer and head that shows it.

    `trace` is None if the sentence is not about a head.
    """

    sentence: str
    trace: Trace | None = None
    layer: int = 0
    head: int = 0


class TextModel(Protocol):
    """A model with its tokenizer, such as `hf.Checkpoint` and `demo.Storyteller`.

    Attributes:
        path: its folder or file; None for the included model.
        module: the module that runs on a text.
        predictor: the module that returns logits of the next token; None if the model was not
            trained to predict it.
        depth: the number of layers; None if unknown.
        words: the token of each id.
        is_small: whether it is fast enough for `clearhead look` to measure the effects of its heads
            by default.
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
        """Return the tokens of a text, and the inputs of `module` for it."""

    def run(self, inputs: dict[str, Tensor], *, predict: bool = False) -> Any:
        """Return the output of `module`; with `predict`, that of `predictor` if there is one."""

    def explain(self, text: str, layer: int = 0) -> Trace:
        """Return the `Trace` of one layer on a text."""

    def annotate(self, report: Report) -> Report:
        """Return the report of this model with what the model adds: measured labels, unknown words,
        the model itself for the page."""

    def remarks(self, text: str) -> Sequence[Remark]:
        """Return further sentences about a text."""
