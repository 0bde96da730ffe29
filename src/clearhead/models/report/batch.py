"""Report on each text of a batch, from one run of the model: `report_batch`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, kind_of, must_be_of
from ...core.functional.ambient import FollowedCall, listening, must_not_be_sharded
from ...hf import Checkpoint
from ...nn.token_ids import as_batch, run_with_known_ids
from ..follow.column_positions import warn_of_column_positions
from ..follow.coverage import warn_if_missed
from ..follow.cross_attention import TextTracker
from ..follow.layers import module_hooks, no_attention_call, warn_if_compiled
from ..follow.text_stack import TextStack
from ..progress import progress_bar
from .collect import Collector
from .one_text import TextOfBatch
from .result import Report
from .run import FOLLOWS, annotated, depth_of


def report_batch(
    model: Checkpoint | nn.Module,
    texts: Sequence[str] | Tensor | Mapping[str, Tensor],
    *,
    tokens: Sequence[Sequence[str]] | None = None,
    decoder_tokens: Sequence[Sequence[str]] | None = None,
    name: str | None = None,
    progress: bool | None = None,
) -> list[Report]:
    """Run a model once on a batch of texts, and return a `Report` of each text.

    A report is the same as that of `report` on the text alone, up to rounding. It has no column of
    padding, which is read from a 2-D `attention_mask` of transformers, the `key_padding_mask` of
    torch.nn.MultiheadAttention, or `lengths`.

    Args:
        model: a checkpoint, or any module whose attention goes through clearhead.
        texts: for a checkpoint, texts, which are padded on the right; for a module its inputs, a
            tensor or a dict of tensors. Ids of one text, (T,), are a batch of one.
        tokens: for a module, the tokens of each text, without padding. None means numbers.
        decoder_tokens: the same for the decoder of a model with cross-attention, as in `report`.
        name: the name of the model in the reports. None means that of the checkpoint, or the class.
        progress: show a progress bar on stderr, one step per layer. None shows it only in a
            terminal.

    Raises:
        BadValue, BadType: as `report`; a number of `tokens` that does not fit; a call inside
            `distributed.sharded`.

    Warns if texts are padded on the left, and the model counts positions from the padding.
    """
    must_not_be_sharded("report_batch")
    module, inputs, tokens, written = _read(model, texts, tokens)
    collectors: list[Collector] = []
    crops: list[TextOfBatch] = []
    stack = TextStack()
    bar = progress_bar("reading, layer by layer", depth_of(module), progress)
    with bar as advance, torch.no_grad():

        def on_call(call: FollowedCall) -> None:
            problem, inputs = call.problem, call.inputs
            stack.calls += 1
            if not collectors:
                for tracker in _trackers(problem.B, tokens, decoder_tokens, stack):
                    crops.append(TextOfBatch(len(crops)))
                    collectors.append(Collector(tracker))
            if problem.B != len(collectors):
                gave = f"A call has a batch of {problem.B}, and an earlier one {len(collectors)}."
                rule = "every call of a layer has the same texts."
                raise BadValue(gave, rule, "use report(model, text) for each text.")
            at = stack.positions(problem)
            for collector, crop in zip(collectors, crops, strict=True):
                collector.add_layer(collector.begin(*crop.call(problem, inputs, at)))
            advance()

        with module_hooks(module, stack.enter, stack.leave), listening(on_call):
            run_with_known_ids(module, inputs)
    if not collectors:
        raise no_attention_call(module, FOLLOWS)
    warn_if_compiled(module, stacklevel=3)
    warn_if_missed("report_batch", stack.missed, stacklevel=2)
    warn_of_column_positions(module, inputs)
    reader = model if isinstance(model, Checkpoint) else None
    called = type(module).__name__ if reader is None else reader.name
    reports = []
    for number, collector in enumerate(collectors):
        report = collector.report(called if name is None else name)
        reports.append(report if reader is None else annotated(report, reader, written[number]))
    return reports


def _read(
    model: Any, texts: object, tokens: Sequence[Sequence[str]] | None
) -> tuple[nn.Module, Any, Sequence[Sequence[str]] | None, Sequence[str]]:
    """Return the module with its inputs, the tokens of each text, and the texts as written."""
    if isinstance(model, Checkpoint):
        listed: list[str] = list(texts) if isinstance(texts, (list, tuple)) else []
        if not listed or not all(isinstance(text, str) for text in listed):
            rule = "a checkpoint reads one or more texts."
            hint = "pass a list of strings; for one text, use report(checkpoint, text)."
            raise BadType(f"report_batch got {kind_of(texts)} for a checkpoint.", rule, hint)
        read = [model.tokens_and_inputs(text) for text in listed]
        longest = max(len(own) for own, _ in read)
        rows = [x["input_ids"] for _, x in read]
        inputs = {
            **read[0][1],
            "input_ids": _stacked(rows, longest),
            "attention_mask": _stacked([torch.ones_like(x) for x in rows], longest),
        }
        return model.module, inputs, [own for own, _ in read], listed
    rule = "a model is a Checkpoint or a torch.nn.Module."
    must_be_of(nn.Module, "report_batch", model, rule, "load a folder by hf.Checkpoint(folder).")
    rule = "a module runs on its inputs: a tensor or a dict of tensors, with a batch of texts."
    hint = "pass for example tokenizer(texts, padding=True, return_tensors='pt')."
    name = f"report_batch of the module {type(model).__name__}"
    must_be_of((Tensor, Mapping), name, texts, rule, hint)
    return model, as_batch(texts), tokens, ()


def _stacked(rows: list[Tensor], longest: int) -> Tensor:
    """Pad rows (1, T) on the right with 0, (B, longest)."""
    return torch.cat([F.pad(row, (0, longest - row.shape[1])) for row in rows])


def _trackers(
    B: int,
    tokens: Sequence[Sequence[str]] | None,
    decoder_tokens: Sequence[Sequence[str]] | None,
    stack: TextStack,
) -> list[TextTracker]:
    """Return a tracker for each text, with the modules that are running now and later."""
    for argument, lists in (("tokens", tokens), ("decoder_tokens", decoder_tokens)):
        if lists is not None and len(lists) != B:
            gave = f"{argument} has the tokens of {len(lists)} texts, and the batch has {B}."
            rule = f"{argument} is a list for each text."
            raise BadValue(gave, rule, "pass the tokens of every text, without padding.")
    none = [None] * B
    pairs = zip(tokens or none, decoder_tokens or none, strict=True)
    return [TextTracker(*pair, stack) for pair in pairs]
