"""What each head, or each edit, does to a metric: by running, and estimated from gradients."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import BadType, BadValue, as_count, kind_of, why_failed
from ..results.effects import Effect, Effects
from .digest import Digests
from .edits import Edit, ablate
from .estimate import Recorder, estimate as estimated
from .hooks import editing, module_hooks
from .intervene import intervene
from .layers import no_attention_call
from .metrics import Metric, next_token_loss
from .progress import progress_bar
from .token_ids import run, run_with_known_ids

TOKENS_AT_ONCE = 4096  # in the copies of a batch that are run together


def effects(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    metric: str | Metric = "loss",
    edits: Sequence[Edit] | Mapping[str, Edit | Sequence[Edit]] | None = None,
    *,
    exact: bool = True,
    estimate: bool = True,
    at_once: int | None = None,
    to: str | Path | None = None,
    progress: bool | None = None,
) -> Effects:
    """What each edit does to a metric: ``metric(edited run) - metric(unedited run)``.

    >>> found = ch.effects(model, ids)  # every head, ablated  # doctest: +SKIP
    >>> print(found)  # a table, the largest first  # doctest: +SKIP

    Exact effects are found by running the edited model. Edits that allow it run together, as copies
    of the batch of which each has its own edit, so that a run serves many. Estimates take one
    forward and one backward pass for all edits: the change of each head's output in the unedited
    run, times the metric's gradient. How well they rank the edits is `Effects.correlation`.

    Args:
        model: in eval mode, for dropout would be measured too. It is given ``model(inputs)``, or
            ``model(**inputs)`` for a dict.
        inputs: a tensor that begins with the batch B, or a dict; of a dict, tensors that begin with
            as many rows as the first one are copied with the batch.
        metric: "loss", the mean loss of the next token over the ids that are no padding;
            `logit_difference(...)`; or a function of the model's output for the B rows that gives
            a tensor of one number.
        edits: a list of edits, each by itself, or a dict of names and edits or lists of edits that
            apply together. None means ``ablate(layers=[l], heads=[h])`` for every head.
        exact: run every edit, and measure.
        estimate: estimate every edit from one gradient. Either of the two may be off.
        at_once: how many copies of the batch run together; None means up to 4096 tokens.
        to: a file that takes each exact effect as a line of JSON when it is known. Where it holds
            those of an earlier call for the same model, weights, inputs and metric, edits of the
            same name that hold the same are not run again. A metric is known by its name and what
            it is unedited. None keeps nothing.
        progress: a bar on stderr. None means only in a terminal.

    Raises:
        BadValue, BadType: inputs or metrics that do not fit; an id without embedding; a file of
            other effects, or one that cannot be read or written; a model that never asks clearhead
            for attention; what `intervene` raises.

    Source: as at `ablate`; the estimate Nanda 2023, "Attribution Patching".
    """
    if not isinstance(model, nn.Module):
        raise BadType(
            f"effects got {kind_of(model)}.",
            "it runs a model with edits of its attention.",
            "pass a torch.nn.Module, and its inputs after it.",
        )
    inputs, B = _checked_inputs(inputs)
    most = _most(at_once, inputs)
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", repr(metric))
    measure = _metric(metric, inputs)
    recorder = Recorder(grad=estimate)
    with torch.set_grad_enabled(estimate), editing(recorder):
        with module_hooks(model, recorder.layers.enter, recorder.layers.leave):
            unedited = _number(measure(run_with_known_ids(model, inputs)), name)
    if not recorder.calls:
        raise no_attention_call(
            model, "effects are of edits of attention calls that go through clearhead."
        )
    groups = _groups(edits, recorder)
    baseline = float(unedited.detach())
    guesses: list[float | None] = [None] * len(groups)
    if estimate:
        guesses = list(estimated(list(groups.values()), recorder.calls, unedited))
    recorder.calls.clear()
    found: dict[str, float] = {}
    if exact:
        known = _File(to, model, inputs, name, baseline, groups)
        found = known.values
        rest = {what: group for what, group in groups.items() if what not in found}
        bar = progress_bar(
            "running, edit by edit", len(groups), progress, done=len(groups) - len(rest)
        )
        with bar as advance, torch.no_grad():
            for copies in _batches(rest, B, most):
                for what, value in _together(model, inputs, B, copies, measure, name):
                    known.add(what, value)
                    advance()
    rows = [
        Effect(what, found[what] - baseline if exact else None, guess, *_head_of(group))
        for (what, group), guess in zip(groups.items(), guesses, strict=True)
    ]
    return Effects(name, baseline, tuple(rows))


def _together(
    model: nn.Module,
    inputs: Any,
    B: int,
    copies: Sequence[tuple[str, Sequence[Edit]]],
    measure: Metric,
    name: str,
) -> Iterator[tuple[str, float]]:
    """Run as many copies of the batch as there are groups of edits, and measure each."""
    if len(copies) == 1:
        ((what, edits),) = copies
        with intervene(model, edits):
            yield what, float(_number(measure(run(model, inputs)), name))
        return
    places = (range(start, start + B) for start in range(0, len(copies) * B, B))
    edits = [
        copy
        for place, (_, group) in zip(places, copies, strict=True)
        for edit in group
        if (copy := edit.for_copy(place)) is not None
    ]

    def repeated(x: Tensor) -> Tensor:
        return x.repeat(len(copies), *[1] * (x.dim() - 1)) if x.dim() and len(x) == B else x

    with intervene(model, edits):
        output = run(model, tree_map_only(Tensor, repeated, inputs))
    for i, (what, _) in enumerate(copies):

        def of_copy(x: Tensor, i: int = i) -> Tensor:
            return x[i * B : (i + 1) * B] if x.dim() and len(x) == B * len(copies) else x

        yield what, float(_number(measure(tree_map_only(Tensor, of_copy, output)), name))


def _batches(
    groups: Mapping[str, Sequence[Edit]], B: int, most: int
) -> Iterator[list[tuple[str, Sequence[Edit]]]]:
    """The groups in the order given: as many together as allow it, the others alone."""
    waiting: list[tuple[str, Sequence[Edit]]] = []
    for what, group in groups.items():
        if any(edit.for_copy(range(B)) is None for edit in group):
            yield [(what, group)]
            continue
        waiting.append((what, group))
        if len(waiting) >= most:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _groups(
    edits: Sequence[Edit] | Mapping[str, Edit | Sequence[Edit]] | None, recorder: Recorder
) -> dict[str, tuple[Edit, ...]]:
    if edits is None:
        heads = {call.here.layer: call.problem.H for call in recorder.calls}
        return {
            f"layer {layer} head {head}": (ablate(layers=[layer], heads=[head]),)
            for layer, H in sorted(heads.items())
            for head in range(H)
        }
    named: dict[str, Any] = {}
    if isinstance(edits, Mapping):
        named = dict(edits)
    elif isinstance(edits, Sequence):
        named = {repr(edit): edit for edit in edits}
    else:
        raise _no_edits(f"edits={edits!r}")
    groups = {what: (e,) if isinstance(e, Edit) else e for what, e in named.items()}
    for what, group in groups.items():
        listed = isinstance(group, list | tuple) and group
        if not isinstance(what, str) or not listed or not all(isinstance(e, Edit) for e in group):
            raise _no_edits(f"{what!r}: {group!r}")
    if not groups or (isinstance(edits, Sequence) and len(groups) < len(edits)):
        raise BadValue(
            f"effects got {len(edits)} edits, {len(groups)} of them told apart by what they print.",
            "every effect has a name of its own.",
            "pass a dict of names and edits, or None for every head.",
        )
    return {what: tuple(group) for what, group in groups.items()}


def _no_edits(given: str) -> BadType:
    return BadType(
        f"effects got {given}.",
        "edits is a list of what clearhead.edits makes, or a dict of names and of edits.",
        "pass for example {'first': clearhead.edits.knock_out(clearhead.prefix(1))}.",
    )


def _head_of(group: Sequence[Edit]) -> tuple[int | None, int | None]:
    """The layer and head of edits that are about one head."""
    places = {
        (edit.layers[0], edit.heads[0])
        if edit.layers and edit.heads and len(edit.layers) == len(edit.heads) == 1
        else (None, None)
        for edit in group
    }
    layer, head = places.pop()
    alone = not places and isinstance(layer, int) and isinstance(head, int)
    return (layer, head) if alone else (None, None)  # type: ignore[return-value]  # whole numbers, as said


# ------------------------------------------------------------------------------ inputs and metrics


def _checked_inputs(inputs: object) -> tuple[Any, int]:
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    first = next((x for x in tensors if isinstance(x, Tensor)), None)
    if first is None or not first.dim():
        raise BadType(
            f"effects got {kind_of(inputs)} for inputs.",
            "inputs are a tensor that begins with the batch, or a dict of them.",
            "pass for example ids of shape (B, T).",
        )
    return (dict(inputs) if isinstance(inputs, Mapping) else inputs), len(first)


def _metric(metric: object, inputs: Any) -> Metric:
    if callable(metric):
        return metric
    if metric != "loss":
        raise BadValue(
            f"effects got metric={metric!r}.",
            'a metric is "loss", logit_difference(...) or a function of the output.',
            'pass metric="loss", or a function that gives a tensor of one number.',
        )
    return next_token_loss(inputs)


def _number(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"{tuple(value.shape)} numbers" if isinstance(value, Tensor) else kind_of(value)
        raise BadValue(
            f"The metric {name} gave {what}.",
            "a metric gives a tensor of one number for the rows of the batch.",
            "take the mean, for example.",
        )
    return value.reshape(())


def _most(at_once: int | None, inputs: Any) -> int:
    if at_once is not None:
        rule = "it says how many copies of the batch run together, 1 or more."
        way_out = f"pass a whole number, or None for as many as have {TOKENS_AT_ONCE} tokens."
        return as_count("effects got at_once", at_once, rule, way_out, least=1)
    tensors = [x for x in (inputs.values() if isinstance(inputs, dict) else [inputs])]
    sizes = [x.shape[0] * (x.shape[1] if x.dim() > 1 else 1) for x in tensors if hasattr(x, "dim")]
    return max(1, TOKENS_AT_ONCE // max(1, *sizes, 1))


# ------------------------------------------------------------------------- what is kept on the way


class _File:
    """The metric of each edited run, by name, and the file that keeps them. A line holds the digest
    of its edits, and is read for those alone."""

    def __init__(
        self,
        path: str | Path | None,
        model: nn.Module,
        inputs: Any,
        metric: str,
        baseline: float,
        groups: Mapping[str, Sequence[Edit]],
    ) -> None:
        self.path, self.values = (None if path is None else Path(path)), dict[str, float]()
        if self.path is None:
            return
        digests = Digests()
        given = inputs if isinstance(inputs, dict) else {"": inputs}
        tensors, weights = (
            {name: x for name, x in held.items() if isinstance(x, Tensor)}
            for held in (given, model.state_dict())
        )
        header = json.dumps(
            {
                "model": type(model).__name__,
                "weights": digests.of(weights),
                "metric": metric,
                "inputs": digests.of(tensors),
                "baseline": round(baseline, 5),
            }
        )
        self.edits = {name: digests.of(group) for name, group in groups.items()}
        lines = self._read(header)
        for number, line in enumerate(lines, 2):
            if not line:
                continue
            name, edits, value = self._parsed(number, line)
            if self.edits.get(name) == edits:
                self.values[name] = value
        self._write("".join(f"{line}\n" for line in [header, *lines]), "w")

    def _read(self, header: str) -> list[str]:
        """The lines after the header. What an interrupted call cut short is lost."""
        assert self.path is not None
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("read", error) from error
        first, *rest = text.split("\n")
        if text and first != header:
            raise BadValue(
                f"The file {str(self.path)!r} holds other effects: {first[:200]}",
                f"it is continued for the same model, weights, inputs and metric: {header}",
                "pass another file as to=, or delete this one.",
            )
        return rest[:-1]

    def _parsed(self, number: int, line: str) -> tuple[str, str, float]:
        try:
            found = json.loads(line)
            return str(found["name"]), found["edits"], float(found["value"])
        except (ValueError, TypeError, KeyError) as error:
            raise BadValue(
                f"Line {number} of the file {str(self.path)!r} is no effect: {line[:200]}",
                "each line after the first is one that effects wrote.",
                "delete the line, or pass another file as to=.",
            ) from error

    def add(self, name: str, value: float) -> None:
        self.values[name] = value
        if self.path is not None:
            line = json.dumps({"name": name, "edits": self.edits[name], "value": value})
            self._write(f"{line}\n", "a")

    def _write(self, text: str, mode: str) -> None:
        assert self.path is not None
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise self._failed("written", error) from error

    def _failed(self, verb: str, error: OSError) -> BadValue:
        return BadValue(
            f"The file {str(self.path)!r} cannot be {verb}: {why_failed(error)}.",
            "to= is a file that takes each effect as a line.",
            "pass a file in a folder that exists and may be written to.",
        )
