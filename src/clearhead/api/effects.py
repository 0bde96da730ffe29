"""What each head, or each edit, does to a metric: by running, and estimated from gradients."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import BadType, BadValue, kind_of
from ..results.effects import Effect, Effects
from .edits import Edit, ablate
from .estimate import Recorder, estimate as estimated
from .hooks import editing, module_hooks
from .intervene import intervene
from .metrics import Metric, next_token_loss
from .progress import progress_bar

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
        exact, estimate: which of the two.
        at_once: how many copies of the batch run together; None means up to 4096 tokens.
        to: a file that takes each exact effect as a line of JSON when it is known. Where it holds
            those of an earlier call for the same model, inputs and metric, these are not run again.
            None keeps nothing.
        progress: a bar on stderr. None means only in a terminal.

    Raises:
        BadValue, BadType: inputs or metrics that do not fit; a file of other effects; a model that
            never asks clearhead for attention; what `intervene` raises.

    Source: as at `ablate`; the estimate Nanda 2023, "Attribution Patching".
    """
    inputs, B = _checked_inputs(inputs)
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", repr(metric))
    measure = _metric(metric, inputs)
    recorder = Recorder(grad=estimate)
    with torch.set_grad_enabled(estimate), editing(recorder):
        with module_hooks(model, recorder.layers.enter, recorder.layers.leave):
            unedited = _number(measure(_run(model, inputs)), name)
    if not recorder.calls:
        raise BadValue(
            f"The {type(model).__name__} ran, and made no attention call through clearhead.",
            "effects are of edits of attention calls that go through clearhead.",
            "call this inside `with clearhead.compat.patched():` if it uses torch's function, load "
            'it with attn_implementation="clearhead", or build it from clearhead.nn.',
        )
    groups = _groups(edits, recorder)
    baseline = float(unedited.detach())
    guesses: list[float | None] = [None] * len(groups)
    if estimate:
        guesses = list(estimated(list(groups.values()), recorder.calls, unedited))
    recorder.calls.clear()
    found: dict[str, float] = {}
    if exact:
        known = _File(to, _header(model, inputs, name, baseline))
        found = known.values
        rest = {what: group for what, group in groups.items() if what not in found}
        bar = progress_bar(
            "running, edit by edit", len(groups), progress, done=len(groups) - len(rest)
        )
        with bar as advance, torch.no_grad():
            for copies in _batches(rest, B, _most(at_once, inputs)):
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
            yield what, float(_number(measure(_run(model, inputs)), name))
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
        output = _run(model, tree_map_only(Tensor, repeated, inputs))
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
    groups = {what: (e,) if isinstance(e, Edit) else e for what, e in named.items()}
    for what, group in groups.items():
        listed = isinstance(group, list | tuple) and group
        if not isinstance(what, str) or not listed or not all(isinstance(e, Edit) for e in group):
            raise BadType(
                f"effects got {what!r}: {group!r}.",
                "edits is a list of what clearhead.edits makes, or a dict of names and of edits.",
                "pass for example {'first': clearhead.edits.knock_out(clearhead.prefix(1))}.",
            )
    if not groups or (isinstance(edits, Sequence) and len(groups) < len(edits)):
        raise BadValue(
            f"effects got {len(edits)} edits, {len(groups)} of them told apart by what they print.",
            "every effect has a name of its own.",
            "pass a dict of names and edits, or None for every head.",
        )
    return {what: tuple(group) for what, group in groups.items()}


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


def _run(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _most(at_once: int | None, inputs: Any) -> int:
    if at_once is not None:
        return max(1, at_once)
    tensors = [x for x in (inputs.values() if isinstance(inputs, dict) else [inputs])]
    sizes = [x.shape[0] * (x.shape[1] if x.dim() > 1 else 1) for x in tensors if hasattr(x, "dim")]
    return max(1, TOKENS_AT_ONCE // max(1, *sizes, 1))


# ------------------------------------------------------------------------- what is kept on the way


def _header(model: nn.Module, inputs: Any, metric: str, baseline: float) -> dict[str, Any]:
    digest = hashlib.sha256()
    for x in inputs.values() if isinstance(inputs, dict) else [inputs]:
        if isinstance(x, Tensor):
            digest.update(repr((x.shape, x.dtype)).encode() + x.cpu().double().numpy().tobytes())
    return {
        "model": type(model).__name__,
        "metric": metric,
        "inputs": digest.hexdigest()[:16],
        "baseline": round(baseline, 5),
    }


class _File:
    """The metric of each edited run, by name, and the file that keeps them."""

    def __init__(self, path: str | Path | None, header: dict[str, Any]) -> None:
        self.path, self.values = (None if path is None else Path(path)), dict[str, float]()
        if self.path is None:
            return
        if not self.path.exists() or not self.path.stat().st_size:
            self._write(header, "w")
            return
        first, *rest = self.path.read_text(encoding="utf-8").split("\n")
        if first != json.dumps(header):
            raise BadValue(
                f"The file {str(path)!r} holds other effects: {first[:200]}",
                f"it is continued for the same model, inputs and metric: {json.dumps(header)}",
                "pass another file as to=, or delete this one.",
            )
        lines = [line for line in rest[:-1] if line]  # what an interrupted call cut short is lost
        self.path.write_text("\n".join([first, *lines, ""]), encoding="utf-8")
        self.values = {one["name"]: one["value"] for one in map(json.loads, lines)}

    def add(self, name: str, value: float) -> None:
        self.values[name] = value
        if self.path is not None:
            self._write({"name": name, "value": value}, "a")

    def _write(self, line: dict[str, Any], mode: str) -> None:
        assert self.path is not None
        with self.path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
