"""Run a model on one text after another, for the requests of a page: `Reader`."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...core.errors import BadValue, kind_of
from ...core.errors.limits import MOST_LETTERS, MOST_TRACED_TOKENS
from ...core.functional.ambient import FollowedCall, listening
from ...core.functional.trace import Trace
from ...corpus import Survey
from ...models.inspect.intervene import intervene
from ...models.report import Report, report, tile
from ...models.report.text_model import TextModel
from ...models.why import Why, why
from ..html.schema import SurveyVectors
from ..html.vectors import vectors_data
from ..load import load_text_model
from .edits import read_edits

OnProgress: TypeAlias = Callable[[int, int | None], None]


class Cancelled(BaseException):
    """Ends a run whose client has disconnected.

    It is not an `Exception`, so that the error handling of a model does not catch it.
    """


def no_progress(done: int, total: int | None) -> None:
    """Default callback: does nothing."""


class Reader:
    """A model that runs on texts with edits.

    Args:
        model: a folder or file, as for `clearhead look`: a Hugging Face checkpoint or a
            storyteller. None means the included storyteller.
        survey: a survey of the model, for `vectors`.

    The methods accept `edits` in the format of `read_edits`. ``on_progress(done, total)`` is called
    when a run starts and after each attention call, with the number of calls; `total` is None if
    unknown. An exception in it ends the run. There is one run at a time: calls from several threads
    wait for each other.

    Raises `BadValue` for a model that cannot be loaded, and for a survey of another model.
    """

    def __init__(
        self, model: str | Path | TextModel | None = None, survey: Survey | None = None
    ) -> None:
        if model is None or isinstance(model, (str, Path)):
            model = load_text_model(model)
        self.model, self.survey = model, survey
        self._surveyed = None if survey is None else survey.must_be_of(model)
        self._turn = threading.Lock()

    def report(
        self,
        text: str,
        edits: object = None,
        on_progress: OnProgress = no_progress,
        *,
        progress: bool | None = False,
    ) -> Report:
        """Return the report of the edited model on a text, with its `outputs`.

        It has the next token if nothing is edited. `progress` is as in `report`.
        """
        outputs = hashlib.sha256()

        def listen(call: FollowedCall) -> None:
            outputs.update(call.out.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())

        with self._reading(text, edits, on_progress), listening(listen):
            result = report(self.model, text, next_token=not read_edits(edits), progress=progress)
        return replace(result, outputs=outputs.hexdigest())

    def tile(
        self,
        text: str,
        layer: int,
        head: int,
        queries: range,
        keys: range,
        edits: object = None,
        on_progress: OnProgress = no_progress,
    ) -> Trace:
        """Return the exact weights of a part of one head, as `report.tile`."""
        with self._reading(text, edits, on_progress):
            return tile(self.model, text, layer, head, queries, keys)

    def steps(
        self, text: str, layer: int, edits: object = None, on_progress: OnProgress = no_progress
    ) -> Trace:
        """Return every step of one layer of the edited model, of a text of at most 512 tokens."""
        with self._reading(text, edits, on_progress):
            tokens, _ = self.model.tokens_and_inputs(text)
            if len(tokens) > MOST_TRACED_TOKENS:
                rule = f"every step is computed of texts of at most {MOST_TRACED_TOKENS} tokens."
                hint = "use a shorter text."
                raise BadValue(f"The text has {len(tokens):,} tokens.", rule, hint)
            return self.model.explain(text, layer)

    def why(
        self, text: str, edits: object = None, on_progress: OnProgress = no_progress, **options: Any
    ) -> Why:
        """Return why a head of the edited model looks from a query at a key: `clearhead.why` with
        these options."""
        with self._reading(text, edits, on_progress):
            return why(self.model.module, self.model.tokens_and_inputs(text)[1], **options)

    def vectors(
        self, layer: int, head: int, on_progress: OnProgress = no_progress
    ) -> SurveyVectors:
        """Return the vectors of a head at examples of the survey, as data for its page.

        ``on_progress(done, total)`` counts contexts. Raises `BadValue` without a survey.
        """
        if self.survey is None or self._surveyed is None:
            rule = "vectors are those of the examples of a survey."
            hint = "start it with clearhead serve --model DIR --survey OUT."
            raise BadValue("This server has no survey.", rule, hint)
        with self._turn:
            vectors = self.survey.vectors(self._surveyed, layer, head, on_context=on_progress)
            return vectors_data(self.survey, vectors)

    @contextmanager
    def _reading(self, text: str, edits: object, on_progress: OnProgress) -> Iterator[None]:
        """Wait for other runs, then edit the model and call `on_progress` inside the block."""
        _must_be_readable(text)
        parsed = read_edits(edits)
        done = 0

        def listen(call: FollowedCall) -> None:
            nonlocal done
            done += 1
            on_progress(done, self.model.depth)

        with self._turn:
            on_progress(0, self.model.depth)
            with intervene(self.model.module, parsed, must_apply=False) as seen:
                with listening(listen), torch.no_grad():
                    yield
        for number, edit in enumerate(parsed):
            if not seen.times(number):
                rule = f"an edit applies in layers that exist: {done} called attention."
                hint = f"use layer indices 0 to {done - 1}."
                raise BadValue(f"{edit!r} never applied.", rule, hint)


def _must_be_readable(text: object) -> None:
    rule = f"a text has at least one word and at most {MOST_LETTERS:,} letters."
    if not isinstance(text, str):
        raise BadValue(f"The text is {kind_of(text)}.", rule, "send a text.")
    if not text.strip():
        raise BadValue("The text is empty.", rule, "type a text.")
    if len(text) > MOST_LETTERS:
        raise BadValue(f"The text has {len(text):,} letters.", rule, "send a shorter text.")
