"""Run a model over a text and listen."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..api.hooks import listening, module_hooks
from ..errors import BadType, BadValue, folder, kind_of
from ..hf import Checkpoint
from ..problem.problem import Inputs, Problem
from ..views import html, plot
from ..views.html.steps import MAP_SIDE
from .collect import Listener
from .cross_attention import Texts
from .report import Report

LONG = (
    "Of a text this long, maps are pooled: a cell is the mean weight of a bin of queries on a bin "
    "of keys. Exact weights of any part: clearhead look FILE --model DIR --tile "
    "LAYER:HEAD:QUERIES:KEYS, for example --tile 0:3:64-127:0-63."
)


def report(
    model: "str | Path | Checkpoint | nn.Module",
    text: "str | Tensor | Mapping[str, Tensor]",
    *,
    tokens: Sequence[str] | None = None,
    decoder_tokens: Sequence[str] | None = None,
    name: str | None = None,
    progress: bool | None = None,
) -> Report:
    """Run a model once over one text, and report what each of its heads looks at.

    Args:
        model: a checkpoint folder, a `Checkpoint`, or any module whose attention goes through
            clearhead; it computes what it always computes.
        text: a text for a checkpoint, of which an encoder-decoder's encoder alone is run; for a
            module its input, a tensor or a dict of them, B = 1.
        tokens: what a module's input says, one string a position. None means numbers.
        decoder_tokens: in a model that looks from one text into another, what the text says that
            looks; `tokens` are then those of the other. None means numbers. A call belongs to it
            if its module, or one around it, was given another text (an argument named context,
            memory, key_value_states, encoder_hidden_states or cross_attention_states), or if such
            a call came before it.
        name: what the report calls the model. None means the name of the checkpoint, or its class.
        progress: a bar on stderr, one step a layer. None means only in a terminal.

    Raises:
        BadValue, BadType: a folder, a text or tokens that do not fit; a batch of texts; a model
            that never asks clearhead.
    """
    model, run, read, layers = question(model, text)
    texts = Texts(read if tokens is None else tokens, decoder_tokens)
    listener = Listener(texts, [])
    with _bar(layers, progress) as step, torch.no_grad():

        def on_call(problem: Problem, inputs: Inputs, out: Tensor) -> None:
            listener.on_call(problem, inputs)
            step()

        with module_hooks(module_of(model), texts.enter, texts.leave), listening(on_call):
            run()
    if not listener.layers:
        raise BadValue(
            f"The {type(module_of(model)).__name__} never asked for attention.",
            "a report is about the attention calls that go through clearhead.",
            "use a model that hands its attention to transformers' interface; this one does not."
            if isinstance(model, Checkpoint)
            else 'load it with attn_implementation="clearhead", or build it from clearhead.nn.',
        )
    if name is None:
        name = model.name if isinstance(model, Checkpoint) else type(model).__name__
    texts.must_fit()
    count = listener.layers[0].received.shape[-1]
    named = texts.tokens["tokens"] or tuple(str(i) for i in range(count))
    return Report(name, named, tuple(listener.layers))


def write(found: Report, out: str | Path) -> dict[str, Path]:
    """Write the page, the pictures and the numbers of a report to the folder `out`.

    Gives what was written, by kind; without matplotlib there are no pictures among it. Raises
    `BadValue` for a folder that cannot be made.
    """
    out = folder(out, "the page and the pictures are")
    note = LONG if len(found.tokens) > MAP_SIDE else ""
    paths = {
        "page": html.write_report(found, out / "model.html", note=note),
        "numbers": out / "report.json",  # model.json is what `measure` leaves beside a storyteller
    }
    paths["numbers"].write_text(
        json.dumps(found.to_json(), indent=1, allow_nan=False), encoding="utf-8"
    )
    if not plot.can_draw():
        return paths
    for kind, figure in (
        ("entropy", plot.entropy_by_layer(found).figure),
        ("maps", plot.model(found)),
    ):
        paths[kind] = plot.save(figure, out / f"{kind}.png")  # type: ignore[arg-type]  # no figure is part of another here
    return paths


def question(
    model: Any, text: Any
) -> tuple["Checkpoint | nn.Module", Callable[[], object], list[str] | None, int | None]:
    """The model, how to run it on the text, the tokens, and how many layers it should have."""
    if isinstance(model, (str, Path)):
        model = Checkpoint(model)
    if isinstance(model, Checkpoint):
        if not isinstance(text, str):
            raise BadType(
                f"A checkpoint was given {kind_of(text)}.",
                "a checkpoint has a tokenizer and reads text.",
                "pass a string; for token ids pass checkpoint.model itself, and tokens=.",
            )
        checkpoint: Checkpoint = model
        given: dict[str, Any]
        tokens, given = checkpoint.read(text)
        if getattr(checkpoint.model.config, "use_cache", False) and not checkpoint.has_decoder:
            # Keys and values kept for a next token that nobody asks for: 270 MB at 32k tokens.
            given = {**given, "use_cache": False}
        return model, lambda: checkpoint.run(given), tokens, _depth(checkpoint.model)
    if not isinstance(model, nn.Module):
        raise BadType(
            f"report got {kind_of(model)} for a model.",
            "a model is a checkpoint folder, a Checkpoint or a torch.nn.Module.",
            "pass one of these.",
        )
    if isinstance(text, str):
        raise BadType(
            f"A {type(model).__name__} was given a text.",
            "a module has no tokenizer, and is run on its inputs.",
            "pass its input, a tensor or a dict of them, and tokens=; or a checkpoint's folder.",
        )
    if isinstance(text, Mapping):
        return model, lambda: model(**text), None, _depth(model)
    return model, lambda: model(text), None, _depth(model)


def module_of(model: "Checkpoint | nn.Module") -> nn.Module:
    return model.model if isinstance(model, Checkpoint) else model


def _depth(model: nn.Module) -> int | None:
    return getattr(getattr(model, "config", None), "num_hidden_layers", None)


@contextmanager
def _bar(layers: int | None, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr, one step a layer; nothing where it is not wanted."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = "reading, layer by layer", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as shown:
        task = shown.add_task("", total=layers)
        yield lambda: shown.advance(task)
