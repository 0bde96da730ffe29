"""Change attention while a model runs: `intervene`, and what it did."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled

from ..errors import BadType, BadValue, kind_of
from ..functional.ambient import THROUGH_CLEARHEAD, EditedCall, editing
from ..functional.plan import Plan, plan_of
from ..problem.problem import Inputs, Problem
from ..torch_state import compiled_parts, in_backward
from .edits.edit import Edit, Here, in_order
from .layers import (
    Layers,
    check_layers,
    is_selected,
    module_hooks,
    never_called,
)


@contextmanager
def intervene(
    model: nn.Module, edits: Sequence[Edit], *, must_apply: bool = True
) -> Iterator["Intervention"]:
    """Attention calls that `model` makes inside the `with` block are edited.

    >>> first = ch.edits.knock_out(ch.prefix(1), layers=[5], heads=[1])  # doctest: +SKIP
    >>> with ch.intervene(model, [first]) as done:  # doctest: +SKIP
    ...     model(x)
    >>> done  # which edit applied where, how often, and which engine answered  # doctest: +SKIP

    It reaches what `watch` reaches: layers of `clearhead.nn`, transformers models with
    ``attn_implementation="clearhead"``, and whatever else calls `attention` inside a module of the
    model, in this thread. `watch` sees the edited attention, in whatever order the two blocks
    stand. Blocks nest: the outer edits come first. Gradients flow through edits; where activations
    are checkpointed, the backward pass computes layers again, so it belongs into the block, in
    which it runs in this thread on a GPU too.

    Args:
        model: any torch.nn.Module that is not compiled.
        edits: what changes, of `clearhead.edits`, which says in which order they apply.
        must_apply: at the end of the block, raise if one of the edits never applied, or applied in
            none of the calls that one of its `layers` names; and warn of one that applied and
            removed no visible edge. With False, the `Intervention` alone tells.

    Yields:
        An `Intervention`, which says what the edits did, as soon as they have.

    Raises:
        BadValue, BadType: what is no edit; a pattern that names no module; a compiled model, whose
            graph holds attention as it was; heads that a layer does not have; what an edit does not
            fit; an edit of some of the calls that a checkpoint may be computing again, for it does
            not say which; and at the end of the block an edit that never applied.
    """
    if not isinstance(model, nn.Module):
        raise BadType(
            f"intervene got {kind_of(model)}.",
            "edits apply to the attention calls of a model's modules.",
            "pass a torch.nn.Module; for one call, pass the edited mask to attention(...).",
        )
    edits = _checked_edits(edits)
    for edit in edits:
        check_layers(edit.layers or (), model)
    refuse_compiled(model)
    editor = _Editor(edits)
    # Else a GPU's backward pass, and what a checkpoint computes in it, runs in a thread of torch's,
    # which knows no edits.
    with (
        module_hooks(model, editor.layers.enter, editor.layers.leave),
        editing(editor),
        set_multithreading_enabled(False),
    ):
        yield editor.done
    if must_apply:
        editor.done.warn_if_unchanged()
        editor.done.must_have_applied(type(model).__name__, editor.layers)


class Applied(NamedTuple):
    """Where an edit applied, and which engine answered."""

    edit: int
    layer: int
    module: str
    engine: str


class Intervention:
    """Which edits applied where, and how often; prints itself.

    `applied` counts by (number of the edit, layer, module, engine). Of these calls, `without_edges`
    counts, by the number of the edit, those in which `knock_out` or `keep_only` removed no edge
    that was visible, so that it changed nothing.
    """

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self.edits = edits
        self.applied: Counter[Applied] = Counter()
        self.without_edges: Counter[int] = Counter()
        self._problems: dict[int, tuple[Problem, str]] = {}

    def times(self, edit: int) -> int:
        """How often an edit applied, by its place in the list."""
        return sum(n for where, n in self.applied.items() if where.edit == edit)

    def plan(self, layer: int) -> Plan:
        """The plan of the last edited call of a layer, for the engine that answered it. Raises
        `BadValue` for a layer in which no edit applied."""
        if layer not in self._problems:
            raise BadValue(
                f"The plan of layer {layer!r} was asked for.",
                f"edits applied in layers {sorted(self._problems) or 'none'}.",
                "ask for one of these, or run the model inside the with block first.",
            )
        return plan_of(*self._problems[layer])

    def __repr__(self) -> str:
        lines = []
        for number, edit in enumerate(self.edits):
            times = self.times(number)
            idle = self.without_edges[number]
            where = "" if idle == times else f" in {idle} of them"
            line = f"{edit!r}: applied {times} time{'s' * (times != 1)}"
            lines.append(f"{line}, removed no visible edge{where}" if idle else line)
            lines += [
                f"  layer {at.layer}  {at.module or 'the model'}  {n}x  answered by {at.engine}"
                for at, n in sorted(self.applied.items())
                if at.edit == number
            ]
        return "\n".join(lines) or "no edits"

    def warn_if_unchanged(self) -> None:
        """Warn of edits that removed no edge that was visible, in no call."""
        for number, edit in enumerate(self.edits):
            if 0 < self.without_edges[number] == self.times(number):
                warnings.warn(
                    f"{edit!r} removed no visible edge, so it changed nothing: what it takes away "
                    "was hidden already",
                    stacklevel=4,
                )

    def must_have_applied(self, model: str, layers: Layers) -> None:
        idle = [f"{edit!r} never applied" for i, edit in enumerate(self.edits) if not self.times(i)]
        if layers.names:
            idle += [
                f"{edit!r} never applied in layer {which!r}"
                for edit in self.edits
                for which in never_called(edit.layers, layers.names)
            ]
        if not idle:
            return
        if not layers.ran:
            rule = f"edits apply while the {model} runs, and it did not run in the with block."
            way = "run it inside of the block: with clearhead.intervene(model, edits): model(x)."
        elif not layers.names:
            rule = (
                f"edits apply to attention calls that go through clearhead, in this thread and "
                f"outside of compiled graphs; the {model} ran and made none."
            )
            way = (
                f"{THROUGH_CLEARHEAD}; some transformers models compute attention themselves, "
                "whatever they are loaded with."
            )
        else:
            last = len(layers.names) - 1
            rule = f"an edit applies in the layers and rows it names; the {model} has layers 0"
            rule += f" to {last}." if last else " alone."
            way = "name others; in Python, must_apply=False lets an edit stay idle."
        raise BadValue(f"{idle[0]}.", rule, way)


class _Editor:
    """Changes the calls inside the `with` block, and counts what was changed."""

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self.edits, self.done = edits, Intervention(edits)
        self.layers = Layers()
        self._calls: Counter[int] = Counter()  # of each layer, in the block
        self._elsewhere = False  # were there calls outside of the model?

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """The call as it is edited."""
        if in_backward():  # a checkpoint computes its layers again
            here = self._computed_again(problem)
            return EditedCall(problem, inputs) if here is None else self._at(here, problem, inputs)
        if not self.layers.inside:
            self._elsewhere = True
            return EditedCall(problem, inputs)
        layer, name = self.layers.next_call()
        self._calls[layer] += 1
        here = Here(layer, name, self._calls[layer] - 1, self.layers.texts.positions(problem))
        return self._at(here, problem, inputs)

    def _computed_again(self, problem: Problem) -> Here | None:
        """One of the calls that this one may repeat, all of which are edited alike; None if it
        repeats none of the block. Raises `BadValue` where an edit tells them apart."""
        if self._elsewhere and not self.layers.inside:
            return None
        at = self.layers.texts.positions(problem)
        found = [
            Here(layer, self.layers.names[layer], call, at)
            for layer in self.layers.computed_again()
            if self._calls[layer]
            for call in sorted({0, self._calls[layer] - 1})
        ]
        for edit in self.edits:
            read = {
                edit.reads(here) if is_selected(edit.layers, here.layer, here.module) else None
                for here in found
            }
            if len(read) > 1:
                layers = sorted({here.layer for here in found})
                raise BadValue(
                    f"{edit!r} tells apart {sum(self._calls[layer] for layer in layers)} calls, of "
                    f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}, and a "
                    "checkpoint computes one of them again.",
                    "in the backward pass a checkpoint does not say which call it repeats, so an "
                    "edit does the same to all that it may be.",
                    "checkpoint no module that runs several times, and open a with block for each "
                    "run; or pass an edit of all these layers that reads one recorded call.",
                )
        return found[-1] if found else None

    def edit_again(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """The last call, edited as that was, for `matrix`."""
        last = self.layers.last_call() if self.layers.inside else None
        if last is None:
            return EditedCall(problem, inputs)
        at = self.layers.texts.positions(problem)
        return self._at(Here(*last, self._calls[last[0]] - 1, at), problem, inputs)

    def _at(self, here: Here, problem: Problem, inputs: Inputs) -> EditedCall:
        applied = {number: self.edits[number] for number in in_order(self.edits, problem, here)}
        unchanged = set()
        for number, edit in applied.items():
            before = problem
            problem, inputs = edit.edit_problem(problem, inputs, here)
            if edit.removes_an_edge(before, problem) is False:
                unchanged.add(number)
        return _EditedCall(problem, inputs, here, applied, frozenset(unchanged), self.done)


@dataclass(frozen=True, eq=False)
class _EditedCall(EditedCall):
    """A call with the edits that apply to it, by their numbers, in order; `unchanged` are those
    that remove no visible edge."""

    here: Here
    edits: Mapping[int, Edit]
    unchanged: frozenset[int]
    done: Intervention

    def visible(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        for edit in self.edits.values():
            problem, inputs = edit.visible_problem(problem, inputs, self.here)
        return problem, inputs

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        here = self.here
        for number, edit in self.edits.items():
            out = edit.edit_output(out, problem, inputs, here)
            if not in_backward():
                self.done.applied[Applied(number, here.layer, here.module, engine)] += 1
                self.done.without_edges[number] += number in self.unchanged
        if self.edits:
            self.done._problems[here.layer] = problem, engine
        return out


def _checked_edits(edits: object) -> tuple[Edit, ...]:
    found = tuple(edits) if isinstance(edits, Iterable) else (None,)
    for edit in found:
        if not isinstance(edit, Edit):
            raise BadType(
                f"intervene got edits={edits!r}.",
                "edits is a list of what clearhead.edits makes.",
                "pass for example [clearhead.edits.knock_out(clearhead.prefix(1), layers=[0])].",
            )
    return found


def refuse_compiled(model: nn.Module) -> None:
    """Raises `BadValue` if the model, or a part of it, is compiled."""
    if compiled := compiled_parts(model):
        raise BadValue(
            f"The {type(model).__name__} is compiled: {compiled[0] or 'the model itself'}.",
            "a compiled graph holds attention as it was when it was compiled.",
            "intervene on the model that is not compiled.",
        )
