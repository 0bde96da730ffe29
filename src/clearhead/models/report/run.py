"""Run a model over a text and report on every attention call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...core.errors import AttentionError, BadType, BadValue, kind_of, must_be_of
from ...core.errors.limits import MOST_LOGITS
from ...core.functional.ambient import FollowedCall, listening, without_followers
from ...core.functional.explain import explain_problem
from ...core.functional.trace import steps_at
from ...core.problem.problem import Inputs, Problem
from ...core.stats import Statistics
from ...hf import Checkpoint, ImageCheckpoint, SoundCheckpoint, open_checkpoint
from ...nn.token_ids import as_batch, run_with_known_ids
from ..effects.effects import effects as measure_effects
from ..effects.metrics import Metric, turn
from ..follow.coverage import warn_if_missed
from ..follow.cross_attention import TextTracker
from ..follow.layers import no_attention_call, warn_if_compiled
from ..follow.outputs import logits_of, most_probable
from ..follow.picture import PictureTracker, are_in_order
from ..follow.run import ModelFollower
from ..progress import progress_bar
from .collect import BegunCall, Collector
from .findings import Head, Layer
from .next_token import find_next_token
from .norms import NormsOfCalls, without_norms
from .opening import best_heads, opening
from .repeated_tokens import repeated_token_scores
from .result import Report
from .text_model import TextModel

if TYPE_CHECKING:
    from PIL.Image import Image

# For a checkpoint, which is already loaded with attn_implementation="clearhead".
CHECKPOINT_HINT = (
    "run it inside `with clearhead.compat.patched():` if it calls torch's function, or use a model "
    "that uses transformers' attention interface; this one does not."
)
FOLLOWS = "a report describes attention calls that go through clearhead."
GUESSES = 6  # next words per position


def report(
    model: "str | Path | TextModel | nn.Module",
    text: "str | Path | Image | Tensor | Mapping[str, Tensor]",
    *,
    tokens: Sequence[str] | None = None,
    decoder_tokens: Sequence[str] | None = None,
    name: str | None = None,
    effects: bool | str | Metric = False,
    repeated_tokens: bool = False,
    next_token: bool = False,
    progress: bool | None = None,
) -> Report:
    """Run a model once on one text, and report what each of its heads looks at.

    If a convolution cuts an image into patches, calls on these have them as tokens ("patch 2,5" in
    row 2 and column 5), with the roles of neighbours, and the page draws the image.

    For a checkpoint that predicts the next token, the report also has the most probable next tokens
    at each position, unless the text is long.

    Args:
        model: a checkpoint folder, a GGUF file, a model that reads text (`hf.Checkpoint`,
            `demo.load()`), or any module whose attention goes through clearhead. Its output does
            not change.
        text: a text; for a module its input, a tensor or a dict of tensors, B = 1. For an
            encoder-decoder, only the encoder runs on a text. For a checkpoint of a vision model,
            an image: a path, or an image of Pillow. For Whisper the path of a sound.
        tokens: the tokens of a module's input, one string per position. None means numbers.
        decoder_tokens: in a model with cross-attention, the tokens of the decoder's text; `tokens`
            are then those of the encoder's text. None means numbers. A call belongs to the decoder
            if another text was passed to its module, or to one around it (an argument named
            context, memory, key_value_states, encoder_hidden_states or cross_attention_states), or
            after the first such call.
        name: the name of the model in the report. None means that of the checkpoint, or the class.
        effects: also measure the effect of each head, with one run per head (`clearhead.effects`).
            Pass a metric of `effects`. True means "loss", the next-token loss; for a checkpoint
            that does not predict the next token it means "turn", how far the vectors after the last
            layer turn without the head, the mean over tokens of 1 - cosine. If a text has no loss,
            because it is one token long, True gives a report without effects, with the reason in
            `effects_withheld`.
        repeated_tokens: also run the model on random tokens that are repeated, and report the
            induction, duplicate and previous-token scores of each head (`Head.repeated_tokens`).
        next_token: also find the heads that write the predicted next token (`Report.next_token`),
            with `logit_attribution` and at most three runs without a head. If they cannot be
            found, the reason is in `next_token_withheld`.
        progress: show a progress bar on stderr, one step per layer. None shows it only in a
            terminal.

    Raises:
        BadValue, BadType: a folder, a text or tokens that do not fit; an id without embedding; a
            batch of texts; a model that never calls clearhead's attention.
    """
    rule = "next_token is True or False: the token is the one that the model predicts."
    hint = "for another token, call clearhead.logit_attribution(model, ids, target=...)."
    must_be_of(bool, "report with next_token=", next_token, rule, hint)
    run = prepare(model, text)
    own = run.tokens if tokens is None else tokens
    decoder_own = run.decoder_tokens if decoder_tokens is None else decoder_tokens
    reading = _Reading(run.module, own, decoder_own)
    if not are_in_order(run.module, run.start):
        reading.running.texts.pictures = None
    bar = progress_bar("reading, layer by layer", run.depth, progress)
    with bar as advance, torch.no_grad(), reading.followed(attention_only=False):
        reading.advance = advance
        output = run.start()
    values, collector = reading.values, reading.collector
    values.finish()
    if not collector.layers:
        raise no_attention_call(run.module, FOLLOWS, CHECKPOINT_HINT if run.reader else None)
    warn_if_compiled(run.module, stacklevel=3)
    warn_if_missed("report", reading.running.texts.missed, stacklevel=2)
    if values.refused:
        collector.layers = [without_norms(layer, values.refused) for layer in collector.layers]
    result = collector.report(run.name if name is None else name)
    if run.reader is not None:
        result = annotated(result, run.reader, text if isinstance(text, str) else "")
    if run.words is not None:
        guesses = most_probable(logits_of(output)[0], run.words, GUESSES)
        result = replace(result, guesses=guesses)
    if effects is True:
        predicts_none = run.reader is not None and run.reader.predictor is None
        metric = turn(output) if predicts_none else "loss"
        try:
            result = _with_effects(result, run, metric, progress)
        except BadValue as error:
            result = replace(result, effects_withheld=_why(error))
    elif effects is not False:
        result = _with_effects(result, run, effects, progress)
    if next_token:
        result = _with_next_token(result, run, output)
    result = _with_steps(result, run)
    return _with_repeated_tokens(result, run) if repeated_tokens else result


def annotated(result: Report, reader: TextModel, text: str) -> Report:
    """Return the report with its text, and with what the model that read it adds."""
    folder = "" if reader.path is None else str(reader.path.resolve())
    return reader.annotate(replace(result, text=text, folder=folder))


class _Reading(ModelFollower):
    """Collects the layers of a report while the model reads the text."""

    advance: Callable[[], None]  # the progress bar by one layer
    begun: BegunCall

    def __init__(
        self, model: nn.Module, tokens: Sequence[str] | None, decoder_tokens: Sequence[str] | None
    ) -> None:
        super().__init__(model)
        self.running.texts.pictures = PictureTracker(model)
        self.collector = Collector(TextTracker(tokens, decoder_tokens, self.running.texts))
        self.values = NormsOfCalls(model, self.running.texts)

    def begin(self, problem: Problem, inputs: Inputs) -> Statistics:
        norms = self.values.of_call(problem, inputs)
        self.begun = self.collector.begin(problem, inputs, norms=norms)
        return self.begun.statistics if self.begun.real is problem else ()

    def receive(self, call: FollowedCall) -> None:
        self.values.expect(call.problem, call.out)
        self.collector.add_layer(self.begun, call.stats)
        self.running.texts.calls += 1
        self.advance()

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> None:
        self.values.verify(result)
        super().leave(module, args, result)


class ModelRun(NamedTuple):
    """A model with its text.

    Attributes:
        module: the module whose attention calls are reported.
        runs: the module that effects run on `inputs`: `module`, or the predictor around it.
        tokens: the tokens of the text; None if unknown.
        start: a function that runs the model once.
        depth: the number of layers; None if unknown.
        reader: the model that read the text; None for a plain module.
        words: the words that `start` predicts; None if it predicts none.
        decoder_tokens: the tokens of the decoder's text; None if unknown.
    """

    module: nn.Module
    runs: nn.Module
    inputs: "Tensor | Mapping[str, Tensor]"
    name: str
    tokens: list[str] | None
    start: Callable[[], Any]
    depth: int | None
    reader: TextModel | None = None
    words: Sequence[str] | None = None
    decoder_tokens: Sequence[str] | None = None


def prepare(model: "str | Path | TextModel | nn.Module", text: object) -> ModelRun:
    """Check a model and its text or inputs. Raises `BadType` if they do not fit."""
    if isinstance(model, (str, Path)):
        model = open_checkpoint(model)
    if isinstance(model, nn.Module):
        return _module_run(model, text)
    if not hasattr(model, "tokens_and_inputs"):
        rule = "a model is a checkpoint folder, a Checkpoint or a torch.nn.Module."
        raise BadType(f"report got {kind_of(model)} for a model.", rule, "pass one of these.")
    are_ids = isinstance(model, Checkpoint) and isinstance(text, Tensor)
    reads_files = isinstance(model, ImageCheckpoint | SoundCheckpoint)
    if not (are_ids or reads_files or isinstance(text, str)):
        rule = "a checkpoint has a tokenizer and reads text, or the ids of its tokens."
        hint = "pass a string, or a tensor of ids; an image for a model with an image processor."
        raise BadType(f"report got {kind_of(text)} for a checkpoint.", rule, hint)
    tokens, inputs = model.tokens_and_inputs(cast(str, text))
    predicts = model.predictor is not None and len(tokens) * len(model.words) <= MOST_LOGITS
    return ModelRun(
        module=model.module,
        runs=model.predictor or model.module,
        inputs=inputs,
        name=model.name,
        tokens=tokens or None,
        start=partial(model.run, inputs, predict=predicts),
        depth=model.depth,
        reader=model,
        words=model.words if predicts else None,
        decoder_tokens=model.decoder_tokens(inputs) if isinstance(model, SoundCheckpoint) else None,
    )


def _module_run(model: nn.Module, text: object) -> ModelRun:
    if isinstance(text, str | list | tuple):
        gave = f"report got {kind_of(text)} for the module {type(model).__name__}."
        rule = "a module has no tokenizer, and runs on a tensor or a dict of tensors, a batch of 1."
        hint = "pass for example torch.tensor([ids]), tokens=; or a checkpoint folder and a text."
        raise BadType(gave, rule, hint)
    inputs = as_batch(text)
    start = partial(run_with_known_ids, model, inputs)
    return ModelRun(model, model, inputs, type(model).__name__, None, start, depth_of(model))


def depth_of(model: nn.Module) -> int | None:
    """Return the number of layers; None if unknown."""
    return getattr(getattr(model, "config", None), "num_hidden_layers", None)


def _with_effects(
    report: Report, run: ModelRun, metric: str | Metric, progress: bool | None
) -> Report:
    """Return the report with the effect of each head on the metric."""
    measured = measure_effects(run.runs, run.inputs, metric, estimate=False, progress=progress)
    changes = {(effect.layer, effect.head): effect.exact for effect in measured}
    result = report.map_heads(lambda x: replace(x, effect=changes.get((x.layer, x.head))))
    return replace(result, effect_metric=measured.metric)


def _with_next_token(result: Report, run: ModelRun, output: Any) -> Report:
    """Return the report with the predicted next token and the heads that write it."""
    if run.words is None:
        why = "The model predicts no next token, its words are unknown, or the text is long."
        return replace(result, next_token_withheld=why)
    logits = logits_of(output)[0, -1]
    try:
        written = find_next_token(run.runs, run.inputs, run.start, logits, run.words, result.layers)
        return replace(result, next_token=written)
    except (BadValue, BadType) as error:
        return replace(result, next_token_withheld=_why(error))


def _with_steps(result: Report, run: ModelRun) -> Report:
    """Return the report with every step of the head with which it opens, of those that write the
    next token, and of the best head of each role.

    A short text has the steps of all heads. For a longer one, the model runs again.
    """
    begin = opening(result)
    heads = [*best_heads(result).values(), *([] if begin is None else [begin.head])]
    wanted = {(x.layer, x.head) for x in heads} | {(x.layer, x.head) for x in result.writers}
    traced: dict[int, Layer] = {}
    count = 0

    def on_call(call: FollowedCall) -> None:
        nonlocal count
        layer = result.layers[count]
        count += 1
        heads = tuple(sorted(head for at, head in wanted if at == layer.number))
        if heads and not set(heads) <= set(layer.traced_heads):
            trace = explain_problem(call.problem, call.inputs, layer.query_tokens, layer.key_tokens)
            group = call.problem.H // call.problem.G
            trace = steps_at(trace, {"h": heads, "g": sorted({head // group for head in heads})})
            traced[layer.number] = replace(layer, trace=trace, traced_heads=heads)

    is_known = {(x.number, head) for x in result.layers for head in x.traced_heads}
    if wanted <= is_known or any(x.trace is None for x in result.layers):
        return result
    with without_followers(), torch.no_grad(), listening(on_call):
        run.start()
    return replace(result, layers=tuple(traced.get(x.number, x) for x in result.layers))


def _with_repeated_tokens(result: Report, run: ModelRun) -> Report:
    """Return the report with the scores of each head on random repeated tokens."""
    scores = repeated_token_scores(run.module, run.inputs)

    def with_scores(head: Head) -> Head:
        of_layer = scores[head.layer]
        return head if of_layer is None else replace(head, repeated_tokens=of_layer[head.head])

    return result.map_heads(with_scores)


def _why(error: AttentionError) -> str:
    return f"{error.gave.removesuffix('.')}: {error.rule}"
