"""Measure the effect of each head, or each edit, on a metric: `effects`."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import BadType, BadValue, as_count, kind_of
from ...core.errors.limits import TOKENS_AT_ONCE
from ...core.functional.ambient import editing
from ...nn.token_ids import as_batch, run_with_known_ids
from ..follow.column_positions import warn_of_column_positions
from ..follow.copies import Layout, fresh
from ..follow.coverage import warn_if_missed
from ..follow.layers import module_hooks, must_be_runnable, no_attention_call
from ..follow.refused_models import no_random_numbers
from ..inspect.edits import Edit, ablate, cache, path
from ..progress import progress_bar
from .edited_runs import EditedRuns, UneditedRun
from .effect_table import Effect, Effects
from .effects_file import EffectsFile
from .estimate import Recorder, estimate as estimated
from .metrics import Metric, loss_metric
from .sweep import must_have_positions, site_of, sweep


def effects(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    metric: str | Metric = "loss",
    edits: Edit | Sequence[Edit] | Mapping[str, Edit | Sequence[Edit]] | None = None,
    *,
    over: Sequence[str] | None = None,
    exact: bool = True,
    estimate: bool = True,
    at_once: int | None = None,
    to: str | Path | None = None,
    progress: bool | None = None,
) -> Effects:
    """Measure the effect of each edit on a metric: ``metric(edited run) - metric(unedited run)``.

    >>> effects = ch.effects(model, ids)  # ablates every head  # doctest: +SKIP
    >>> print(effects)  # a table, the largest first  # doctest: +SKIP
    >>> edit = ch.edits.patch(clean)  # of each layer and position  # doctest: +SKIP
    >>> effects = ch.effects(model, ids, edits=edit, over=("layers", "positions"))  # doctest: +SKIP

    Exact effects are measured by running the edited model. Edits that allow it run together, as
    copies of the batch with one edit each; the metric of a copy is computed from its rows of the
    output. Copies run one at a time, with a warning, if the output cannot be split into copies (for
    example one loss of all rows), or if rows of a batch depend on each other.

    A model in bfloat16 or float16 rounds its logits, to 3 digits in bfloat16, so an effect below
    that is rounding: load the model in float32 to measure small effects.

    Estimates need one forward and one backward pass for all edits: the change of each head's output
    in the unedited run, times the metric's gradient. `Effects.correlation` measures how well they
    rank the edits, and `Effect.trusted` compares each with its exact effect.

    Args:
        model: a model without randomness, so in eval mode. It is called as ``model(inputs)``, or
            ``model(**inputs)`` for a dict.
        inputs: a tensor with first dimension B, the batch, the ids of one text, (T,), or a dict.
            Every run gets a copy, of caches too, so the inputs do not change. Tensors with B rows
            are repeated when copies run together.
        metric: "loss", `logit_difference(...)`, or a function of the model's output for the B rows
            that returns a tensor of one number. "loss" is the model's own loss if its output has
            one, as with labels in the inputs. For a decoder without labels, it is the mean
            next-token loss over the ids that are not padding.
        edits: a list of edits, applied one at a time; or a dict that maps names to an edit, or to a
            list of edits that apply together; or one edit, which is applied at each place that
            `over` lists. None means ``ablate()``.
        over: the axes over which one edit moves: one or more of "layers", "heads" and "positions".
            It is applied at each combination in turn, of the heads and the positions of each layer.
            An axis that the edit itself restricts has only the values that it names. None means
            ``("layers", "heads")``, every head. For a path they are those of its sender, before its
            receiver; "receivers" also moves the receiver, over those that it names.
        exact: compute exact effects, by running every edit.
        estimate: compute estimates, from one gradient. `exact` or `estimate` may be False.
        at_once: the number of copies of the batch that run together; None means up to 512 tokens.
        to: a file to which each exact effect is appended as a line of JSON. If it has effects of an
            earlier call with the same weights, inputs and name of the metric, equal edits of the
            same name are not run again, except the two with the largest effects. If the metric
            without edits or one of these two is another number, then code, a setting or the metric
            has changed, which raises an error. Edits and inputs with functions or classes of the
            user cannot be compared: they are measured anew, with a warning. None writes no file.
        progress: show a progress bar on stderr. None shows it only in a terminal.

    Raises:
        BadValue, BadType: inputs or metrics that do not fit; "loss" for a model that is not a
            decoder, without labels; an estimate for a metric without gradient; a model that draws
            random numbers, is compiled, or never calls clearhead's attention; an id without
            embedding; a call inside `distributed.sharded`; a file of other effects, or one that
            cannot be read or written; any error of `intervene`.

    Warns if copies run one at a time, if a file cannot be continued, and if texts are padded on the
    left and the model counts positions from the first column. The effects are those of
    ``model(**inputs)`` in all cases.
    Also warns if a module computed attention without clearhead, because it has no effect here.

    Source: as in `ablate`; the estimate Nanda 2023, "Attribution Patching".
    """
    rule = "effects runs a model with edits of its attention."
    must_be_runnable("effects", model, rule, ", then its inputs")
    inputs = checked_inputs(inputs)
    if at_once is not None:
        rule = "it is the number of copies of the batch that run together, 1 or more."
        hint = f"pass a whole number, or None for up to {TOKENS_AT_ONCE} tokens."
        at_once = as_count("effects got at_once", at_once, rule, hint, least=1)
    if not callable(metric) and metric != "loss":
        rule = 'a metric is "loss", logit_difference(...) or a function of the output.'
        hint = 'pass metric="loss", or a function that returns a tensor of one number.'
        raise BadValue(f"effects got {metric=}.", rule, hint)
    estimate = bool(estimate)  # torch accepts nothing else
    recorder = Recorder(grad=estimate)
    with torch.set_grad_enabled(estimate), editing(recorder), no_random_numbers(model):
        with module_hooks(model, recorder.layers.enter, recorder.layers.leave):
            output = run_with_known_ids(model, fresh(inputs))
    problems = [(call.problem, call.site) for call in recorder.calls]
    layout = Layout(output)
    if callable(metric):
        function = metric.func if isinstance(metric, partial) else metric
        name, measure = getattr(function, "__name__", type(function).__name__), metric
    else:
        name, measure = loss_metric(model, inputs, output, problems)
    if not problems:
        raise no_attention_call(model, "effects edits attention calls that go through clearhead.")
    with torch.set_grad_enabled(estimate):
        unedited = _number(measure(output), name)
    del output
    if edits is None or isinstance(edits, Edit):
        axes = ("layers", "heads") if over is None else over
        groups = sweep(ablate() if edits is None else edits, axes, recorder.calls)
    else:
        groups = _groups(edits, over)
    must_have_positions(groups, recorder.calls)
    baseline = float(unedited.detach())
    swept = [edits] if edits is None or isinstance(edits, Edit) else chain(*groups.values())
    named = [which for edit in swept for which in (edit and edit.layers) or (None,)]
    warn_if_missed("effects", recorder.layers.texts.missed, named, stacklevel=2)
    warn_of_column_positions(model, inputs)
    guesses: list[float | None] = [None] * len(groups)
    if estimate:
        guesses = estimated(list(groups.values()), recorder.calls, unedited, name)
    recorder.calls.clear()
    measured: dict[str, float] = {}
    if exact:
        file = None
        if to is not None:
            file = EffectsFile(to, model, inputs, name, baseline, groups)
            measured |= file.values
        rest = {what: group for what, group in groups.items() if what not in measured}
        runs = EditedRuns(
            model,
            inputs,
            UneditedRun(baseline, layout, [problem for problem, _ in problems]),
            lambda output: float(_number(measure(output), name)),
            at_once,
        )
        bar = progress_bar(
            "running, edit by edit", len(groups), progress, done=len(groups) - len(rest)
        )
        with bar as advance, torch.no_grad():
            if file is not None:
                for what, value in runs.measure({x: groups[x] for x in file.largest()}):
                    file.must_repeat(what, value, runs.unedited.eps)
            for what, value in runs.measure(rest):
                measured[what] = value
                if file is not None:
                    file.add(what, value)
                advance()
    rows = [
        Effect(what, measured[what] - baseline if exact else None, guess, **site_of(group))
        for (what, group), guess in zip(groups.items(), guesses, strict=True)
    ]
    return Effects(name, baseline, tuple(rows))


def _groups(
    edits: Sequence[Edit] | Mapping[str, Edit | Sequence[Edit]], over: Sequence[str] | None
) -> dict[str, tuple[Edit, ...]]:
    if over is not None:
        rule = "over moves one edit over layers, heads or positions."
        raise BadValue(f"effects got several edits and {over=}.", rule, "leave out over.")
    rule = "edits is one edit of clearhead.edits, a list of them, or a dict of names and edits."
    hint = "pass for example {'first': clearhead.edits.knock_out(clearhead.prefix(1))}."
    groups = named_edits("effects", edits, (Edit,), rule, hint)
    for one in chain(*groups.values()):
        if isinstance(one, path):
            one.ends()
    return groups


def named_edits(
    verb: str, edits: Any, allowed: tuple[type[Edit], ...], rule: str, hint: str
) -> dict[str, tuple[Edit, ...]]:
    """Return edits that `verb` got, in a list or by name: edits, lists of edits, or formats of a
    cache, if it is `allowed`.

    Raises `BadType`, with `rule` and `hint`, for anything that is not `allowed`, and `BadValue` if
    there is none, or if two of a list have one name: a format, or the repr of an edit.
    """
    if isinstance(edits, str) or not isinstance(edits, Mapping | Sequence):
        raise BadType(f"{verb} got {kind_of(edits)}.", rule, hint)
    if not edits:
        raise BadValue(f"{verb} got 0 edits.", rule, hint)
    named: Any = edits
    if not isinstance(edits, Mapping):
        named = {x if isinstance(x, str) else repr(x): x for x in edits}
    if len(named) < len(edits):
        gave = f"{verb} got {len(edits)} edits with {len(named)} different names."
        rule = "the repr of an edit is its name in the result, and names are unique."
        raise BadValue(gave, rule, "pass a dict of names and edits.")
    groups: dict[str, tuple[Edit, ...]] = {}
    for name, x in named.items():
        one = cache(keys=x, values=x) if isinstance(x, str) and cache in allowed else x
        group = (one,) if isinstance(one, Edit) else one
        is_list = isinstance(name, str) and isinstance(group, list | tuple) and group
        if not is_list or not all(isinstance(edit, allowed) for edit in group):
            raise BadType(f"{verb} got {name!r}: {x!r}.", rule, hint)
        groups[name] = tuple(group)
    return groups


# ------------------------------------------------------------------------------ inputs and metrics


def checked_inputs(inputs: object) -> Any:
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    if not any(isinstance(x, Tensor) and x.dim() for x in tensors):
        rule = "inputs are a tensor whose first dimension is the batch, or a dict of tensors."
        hint = "pass for example ids of shape (B, T)."
        raise BadType(f"effects got {kind_of(inputs)} for inputs.", rule, hint)
    return dict(inputs) if isinstance(inputs, Mapping) else as_batch(inputs)


def _number(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        what, hint = kind_of(value), "take the mean, for example."
        if isinstance(value, Tensor):
            what = f"{tuple(value.shape)} numbers"
            if value.is_complex():
                what, hint = f"{value.dtype} numbers", "take the real part or the absolute value."
        elif value is None:
            hint = "pass labels= in the inputs, from which a model computes its loss."
        rule = "a metric returns a tensor of one real number for the rows of the batch."
        raise BadValue(f"The metric {name} returned {what}.", rule, hint)
    return value.reshape(())
