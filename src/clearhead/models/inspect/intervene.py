"""Edit the attention of a running model (`intervene`), and report which edits applied."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import set_multithreading_enabled

from ...core.errors import BadType, BadValue, is_iterable
from ...core.functional.ambient import THROUGH_CLEARHEAD, EditedCall, Editor, ambient, editing
from ...core.functional.plan import Plan, plan_of
from ...core.problem.problem import Inputs, Problem
from ...core.torch_state import in_autograd_function, in_backward
from ..follow.coverage import left_out, warn_if_missed
from ..follow.layers import (
    SOME_NEVER_DO,
    Layers,
    check_layers,
    is_selected,
    module_hooks,
    must_be_module,
    never_called,
    ran_in_other_thread,
    refuse_compiled,
)
from .edits.edit import Edit, EditSite, in_order
from .edits.patch import patch
from .reentrant import ReentrantCheckpoints


@contextmanager
def intervene(
    model: nn.Module, edits: Sequence[Edit], *, must_apply: bool = True
) -> Iterator["Intervention"]:
    """Edit the attention calls that `model` makes inside the `with` block.

    >>> first = ch.edits.knock_out(ch.prefix(1), layers=[5], heads=[1])  # doctest: +SKIP
    >>> with ch.intervene(model, [first]) as done:  # doctest: +SKIP
    ...     model(x)
    >>> done  # which edit applied where, how often, on which engine  # doctest: +SKIP

    It edits the calls that `watch` records: layers of `clearhead.nn`, transformers models with
    ``attn_implementation="clearhead"``, and any other module of the model that calls `attention`
    in this thread. `watch` records the edited attention, whichever block is the outer one. Blocks
    nest: the outer edits apply first. Gradients flow through edits. With activation checkpointing,
    call `backward()` inside the block as well, because it recomputes layers. Outside, it raises an
    error. Inside the block, the backward pass runs in this thread, on a GPU too.

    Args:
        model: any torch.nn.Module that is not compiled.
        edits: a list of `clearhead.edits`, where the order in which they apply is documented.
        must_apply: at the end of the block, raise `BadValue` if an edit never applied, or never
            applied in one of its `layers`; and warn if an edit removed no visible edge, or leaves
            out a module that computed attention without clearhead. With False, only the
            `Intervention` reports this.

    Yields:
        An `Intervention`, which counts the calls that each edit changed.

    Raises:
        BadValue, BadType: an invalid edit; a pattern that matches no module; heads that do not
            exist, or are divided over ranks; a compiled model; an edit that does not fit a call; an
            edit for which it is ambiguous which call a checkpoint recomputes; and at the end of the
            block, an edit that never applied.
    """
    rule = "edits apply to the attention calls of a model's modules."
    more = "; for one call, pass the edited mask to attention(...)"
    must_be_module("intervene", model, rule, more)
    edits = _checked_edits(edits)
    for edit in edits:
        check_layers(edit.layers, model)
    refuse_compiled(model)
    _check_nesting(edits)
    editor = _Editor(edits)
    # Otherwise torch runs a GPU's backward pass, and the calls that checkpoints recompute in it, in
    # another thread, where no edits are active.
    with (
        module_hooks(model, editor.enter, editor.layers.leave),
        editing(editor),
        set_multithreading_enabled(False),
    ):
        try:
            yield editor.done
        finally:
            editor.reentrant.open = False
    if must_apply:
        editor.done.warn_if_unchanged()
        editor.done.must_have_applied(model, editor.layers)
        # A number is that of a recording, which gave this warning.
        named = [which for edit in edits for which in edit.layers or (None,)]
        named = [which for which in named if not isinstance(which, int)]
        warn_if_missed("intervene", editor.layers.texts.missed, named, stacklevel=3)


class Applied(NamedTuple):
    """The call site at which an edit applied, and the engine that computed the call."""

    edit: int
    layer: int
    module: str
    engine: str


class Intervention:
    """A printable record of which edits applied, at which call sites, and how often.

    `applied` counts calls by (index of the edit, layer, module, engine). `without_edges` counts, by
    index of the edit, the calls in which `knock_out` or `keep_only` removed no visible edge, so
    that it changed nothing.
    """

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self.edits = edits
        self.applied: Counter[Applied] = Counter()
        self.without_edges: Counter[int] = Counter()
        self._problems: dict[int, tuple[Problem, str]] = {}
        self._missed: Mapping[str, type[nn.Module]] = {}

    def times(self, edit: int) -> int:
        """Count the calls to which the edit with this index applied."""
        return sum(n for site, n in self.applied.items() if site.edit == edit)

    def plan(self, layer: int) -> Plan:
        """Return the plan of the last edited call of a layer, for the engine that computed it.

        Raises `BadValue` for a layer in which no edit applied.
        """
        if layer not in self._problems:
            rule = f"edits applied in layers {sorted(self._problems) or 'none'}."
            hint = "pass one of these, or run the model inside the with block first."
            raise BadValue(f"plan got layer {layer!r}.", rule, hint)
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
                f"  layer {at.layer}  {at.module or 'the model'}  {n}x  computed by {at.engine}"
                for at, n in sorted(self.applied.items())
                if at.edit == number
            ]
        if self._missed:
            lines.append(f"left out, because computed without clearhead: {left_out(self._missed)}")
        return "\n".join(lines) or "no edits"

    def warn_if_unchanged(self) -> None:
        """Warn of each edit that removed no visible edge in any call."""
        for number, edit in enumerate(self.edits):
            if 0 < self.without_edges[number] == self.times(number):
                text = f"{edit!r} removed no visible edge: what it removes was already masked"
                warnings.warn(text, stacklevel=4)

    def must_have_applied(self, model: nn.Module, layers: Layers) -> None:
        idle = [f"{edit!r} never applied" for i, edit in enumerate(self.edits) if not self.times(i)]
        if layers.names:
            idle += [
                f"{edit!r} never applied in layer {which!r}"
                for edit in self.edits
                for which in never_called(edit.layers, layers.names)
            ]
        if not idle:
            return
        name = type(model).__name__
        if not layers.ran and layers.ran_in_other_thread:
            raise ran_in_other_thread(model, "edits apply in the thread of the with block.")
        if not layers.ran:
            rule = f"the {name} did not run in the with block, or ran in a graph compiled before."
            hint = "run it inside the block: with clearhead.intervene(model, edits): model(x)."
        elif not layers.names:
            rule = "edits apply to calls through clearhead in this thread, and outside compiled "
            rule += f"graphs; the {name} made none."
            hint = f"{THROUGH_CLEARHEAD}; {SOME_NEVER_DO}."
        else:
            last = len(layers.names) - 1
            rule = f"an edit applies in its layers and positions; the {name} has "
            rule += f"layers 0 to {last}." if last else "only layer 0."
            hint = "change them, or in Python, pass must_apply=False to allow unused edits."
        raise BadValue(f"{idle[0]}.", rule, hint)


class _Editor(Editor):
    """Edits the calls inside the `with` block, and counts them."""

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self.edits, self.done = edits, Intervention(edits)
        self.layers = Layers()
        self.done._missed = self.layers.texts.missed
        self._calls: Counter[int] = Counter()  # by layer, since the block began
        self._outside = False  # did calls come from outside the model?
        self.reentrant = ReentrantCheckpoints()
        self._no_checkpoint = False  # does the model run without gradients, outside a checkpoint?

    def enter(self, name: str, module: nn.Module, *arguments: Any) -> None:
        if not (self.layers.inside or torch.compiler.is_compiling()):
            self._no_checkpoint = not (torch.is_grad_enabled() or in_autograd_function())
        self.layers.enter(name, module, *arguments)

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """Apply the edits to one call."""
        if recomputes := in_backward():  # a checkpoint recomputes its layers
            is_reentrant, site = self.reentrant.recomputed()
            site = site if is_reentrant else self._recomputed(problem)
        else:
            site = self._new_site(problem)
        if recomputes or not (torch.is_grad_enabled() or (site and self._no_checkpoint)):
            self.reentrant.note(site)
        return EditedCall(problem, inputs) if site is None else self._at(site, problem, inputs)

    def _new_site(self, problem: Problem) -> EditSite | None:
        """Return the site of a call of the forward pass; None outside the model."""
        if not self.layers.inside:
            self._outside = True
            return None
        layer, name = self.layers.next_call()
        self._calls[layer] += 1
        return EditSite(layer, name, self._calls[layer] - 1, self.layers.texts.positions(problem))

    def _recomputed(self, problem: Problem) -> EditSite | None:
        """Return the site (layer and call) that a checkpoint recomputes.

        Returns None if the model made no such call inside the `with` block. If several sites fit,
        and every edit treats them alike, it returns one of them. Raises `BadValue` if an edit
        treats them differently.
        """
        if self._outside and not self.layers.inside:
            return None
        at = self.layers.texts.positions(problem)
        candidates = [
            EditSite(layer, self.layers.names[layer], call, at)
            for layer in self.layers.recomputed()
            if self._calls[layer]
            for call in sorted({0, self._calls[layer] - 1})
        ]
        for edit in self.edits:
            read = {
                edit.reads(site) if is_selected(edit.layers, site.layer, site.module) else None
                for site in candidates
            }
            if len(read) > 1:
                layers = sorted({site.layer for site in candidates})
                count = sum(self._calls[layer] for layer in layers)
                gave = f"{edit!r} treats the {count} calls of {layers=} differently."
                rule = "a checkpoint recomputes one of them, and does not reveal which one."
                hint = "checkpoint no module that runs twice, and open a with block for each run; "
                hint += "or pass an edit of all these layers that reads one recorded call."
                raise BadValue(gave, rule, hint)
        return candidates[-1] if candidates else None

    def edit_again(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """Re-apply the last call's edits, so that `matrix` returns the edited weights."""
        last = self.layers.last_call() if self.layers.inside else None
        if last is None:
            return EditedCall(problem, inputs)
        at = self.layers.texts.positions(problem)
        return self._at(EditSite(*last, self._calls[last[0]] - 1, at), problem, inputs)

    def _at(self, site: EditSite, problem: Problem, inputs: Inputs) -> EditedCall:
        applied = {number: self.edits[number] for number in in_order(self.edits, problem, site)}
        unchanged = set()
        if applied and torch.is_grad_enabled() and not in_backward():
            self.reentrant.guard()
        for edit in applied.values():
            problem, inputs = edit.edit_inputs(problem, inputs, site)
        for number, edit in applied.items():
            before = problem
            problem, inputs = edit.edit_problem(problem, inputs, site)
            if edit.removes_an_edge(before, problem) is False:
                unchanged.add(number)
        return _EditedCall(problem, inputs, site, applied, frozenset(unchanged), self.done)


@dataclass(frozen=True, eq=False)
class _EditedCall(EditedCall):
    """A call with the edits that apply to it, by index and in order.

    `unchanged` are the edits that remove no visible edge.
    """

    site: EditSite
    edits: Mapping[int, Edit]
    unchanged: frozenset[int]
    done: Intervention

    def visible(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        for edit in self.edits.values():
            problem, inputs = edit.visible_problem(problem, inputs, self.site)
        return problem, inputs

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        site = self.site
        for number, edit in self.edits.items():
            out = edit.edit_output(out, problem, inputs, site)
            if not in_backward():
                self.done.applied[Applied(number, site.layer, site.module, engine)] += 1
                self.done.without_edges[number] += number in self.unchanged
        if self.edits:
            self.done._problems[site.layer] = problem, engine
        return out


def _checked_edits(edits: object) -> tuple[Edit, ...]:
    checked = tuple(edits) if is_iterable(edits) else (None,)
    for edit in checked:
        if not isinstance(edit, Edit):
            rule = "edits is a list of edits from clearhead.edits."
            hint = "pass for example [clearhead.edits.knock_out(clearhead.prefix(1), layers=[0])]."
            raise BadType(f"intervene got edits={edits!r}.", rule, hint)
        if edit.needs_runs:
            rule = "a path depends on two more runs of the model, and intervene makes none."
            hint = "pass path(...).as_patch(model, inputs), which makes them, or use effects."
            raise BadValue(f"intervene got {edit!r}.", rule, hint)
    return checked


def _check_nesting(edits: Sequence[Edit]) -> None:
    """Raise `BadValue` if a patch would undo what an outer block does to the queries."""
    outer = [e for x in ambient().editors if isinstance(x, _Editor) for e in x.edits]
    changed = [e for e in outer if e.changes_queries]
    for edit in edits:
        if changed and isinstance(edit, patch) and edit.of == "query":
            rule = "the outer block changes queries first, and the patch would replace them."
            hint = "pass both in one list, where patches apply first."
            raise BadValue(f"{edit!r} is in a block inside that of {changed[0]!r}.", rule, hint)
