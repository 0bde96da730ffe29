"""A model that reads one text after another, for a page that asks for them."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..api.hooks import listening
from ..api.intervene import intervene
from ..errors import BadValue
from ..hf import Checkpoint
from ..problem.problem import Inputs, Problem
from ..report import Report, report, report_teller, tile
from ..results.trace import Trace
from ..storyteller import Storyteller, is_storyteller, load
from ..views.html.report import snapshot
from .edits import read_edits

MOST_LETTERS = 200_000  # of a text

OnCall = Callable[[int, int | None], None]


class Cancelled(BaseException):
    """Nobody waits for this run any more. No `Exception`, so that no model's error handling keeps
    it."""


def run_on(done: int, total: int | None) -> None:
    """Lets a run go on: the `on_call` of who wants no progress."""


class Reader:
    """A model, and what it makes of texts.

    Args:
        model: as for `clearhead look`, a folder or file: a Hugging Face checkpoint or a
            storyteller. None means the storyteller that comes with clearhead.

    The methods take `edits` as `read_edits` does, and `on_call`, which is called after each
    attention call with how many there were and how many there will be (None: unknown); what it
    raises ends the run. One run at a time: calls from several threads take turns.

    Raises `BadValue` for a model that cannot be loaded.
    """

    def __init__(self, model: str | Path | Checkpoint | Storyteller | None = None) -> None:
        if model is None or (isinstance(model, (str, Path)) and is_storyteller(model)):
            model = load(model)
        self.model = Checkpoint(model) if isinstance(model, (str, Path)) else model
        self._turn = threading.Lock()

    @property
    def name(self) -> str:
        return "storyteller" if isinstance(self.model, Storyteller) else self.model.name

    @property
    def module(self) -> nn.Module:
        """What runs: of an encoder and a decoder the encoder."""
        return self.model.module if isinstance(self.model, Checkpoint) else self.model.model

    @property
    def depth(self) -> int | None:
        """How many layers there are, None if the model does not say."""
        if isinstance(self.model, Storyteller):
            return self.model.layers
        return getattr(self.model.model.config, "num_hidden_layers", None)

    def report(
        self,
        text: str,
        edits: object = None,
        on_call: OnCall = run_on,
        *,
        progress: bool | None = False,
    ) -> Report:
        """What every head does with the text, under the edits. `progress` is as in `report`."""
        with self._reading(text, edits, on_call):
            if isinstance(self.model, Storyteller):
                return report_teller(self.model, text, progress=progress)
            return report(self.model, text, progress=progress)

    def snapshot(
        self, text: str, edits: object = None, on_call: OnCall = run_on
    ) -> dict[str, object]:
        """The same as what a page holds."""
        return snapshot(self.report(text, edits, on_call))

    def tile(
        self,
        text: str,
        layer: int,
        head: int,
        queries: range,
        keys: range,
        edits: object = None,
        on_call: OnCall = run_on,
    ) -> Trace:
        """The exact weights of a part of one head: see `report.tile`."""
        with self._reading(text, edits, on_call):
            given: str | Mapping[str, Tensor] = text
            if isinstance(self.model, Checkpoint):
                return tile(self.model, given, layer, head, queries, keys)
            encoded = self.model.encode(text)
            ids = torch.tensor([encoded.ids])
            tokens = encoded.labels()
            return tile(self.model.model, ids, layer, head, queries, keys, tokens=tokens)

    @contextmanager
    def _reading(self, text: str, edits: object, on_call: OnCall) -> Iterator[None]:
        """The model's turn: under the edits, calling `on_call` after each attention call."""
        if not isinstance(text, str) or not text.strip() or len(text) > MOST_LETTERS:
            size = f"has {len(text):,} letters" if isinstance(text, str) else "is no text"
            raise BadValue(
                "The text is empty." if isinstance(text, str) and not text else f"The text {size}.",
                f"a text has at least one word and at most {MOST_LETTERS:,} letters.",
                "send a shorter text." if isinstance(text, str) and text.strip() else "type one.",
            )
        parsed = read_edits(edits)
        done = 0

        def listen(problem: Problem, inputs: Inputs, out: Tensor) -> None:
            nonlocal done
            done += 1
            on_call(done, self.depth)

        with self._turn:
            on_call(0, self.depth)
            with intervene(self.module, parsed, must_apply=False) as seen:
                with listening(listen), torch.no_grad():
                    yield
        for number, edit in enumerate(parsed):
            if not seen.times(number):
                raise BadValue(
                    f"{edit!r} never applied.",
                    f"an edit applies in layers that the model has: {done} called attention.",
                    "name layers from 0 on that are there.",
                )
