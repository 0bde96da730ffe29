"""Estimate the effect of an edit on a metric from gradients of the unedited run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.engines.choice import choose
from ...core.errors import BadValue
from ...core.functional.ambient import EditedCall, Editor
from ...core.problem.problem import Inputs, Problem
from ...core.torch_state import in_backward
from ..follow.layers import Layers
from ..inspect.edits.edit import Edit, EditSite, edited_call, in_order


class UneditedCall(NamedTuple):
    """An attention call of the unedited run.

    `zeros` were added to the output `out`; their gradient is the gradient of the output.
    """

    site: EditSite
    problem: Problem
    inputs: Inputs
    out: Tensor
    zeros: Tensor | None


class Recorder(Editor):
    """Records every call; with `grad` it adds zeros to the outputs, to find their gradients."""

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.layers, self.calls = Layers(), list[UneditedCall]()

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        if not self.layers.inside or in_backward():  # a checkpoint recomputes the call
            return EditedCall(problem, inputs)
        layer, name = self.layers.next_call()
        number = sum(call.site.layer == layer for call in self.calls)
        site = EditSite(layer, name, number, self.layers.texts.positions(problem))
        return _RecordedCall(problem, inputs, site, self)


@dataclass(frozen=True, eq=False)
class _RecordedCall(EditedCall):
    site: EditSite
    recorder: Recorder

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        grad = self.recorder.grad
        if grad and not torch.is_grad_enabled():
            gave = f"Layer {self.site.layer} computes attention without gradients."
            rule = "estimates need them; no_grad and use_reentrant=True of a checkpoint have none."
            raise BadValue(gave, rule, "pass estimate=False, or use_reentrant=False to checkpoint.")
        detached = Inputs(*(x.detach() for x in inputs)) if grad else inputs
        zeros = torch.zeros_like(out, requires_grad=True) if grad else None
        self.recorder.calls.append(UneditedCall(self.site, problem, detached, out.detach(), zeros))
        return out if zeros is None else out + zeros


def estimate(
    edits: Sequence[Sequence[Edit]], calls: Sequence[UneditedCall], metric: Tensor, name: str
) -> list[float | None]:
    """Return the estimated effect of each list of edits on the metric; None for lists with a path.

    It is the sum over calls of (edited output - output) . d metric / d output, where the edited
    output is computed from the call's inputs in the unedited run. Raises `BadValue` if the metric,
    called `name`, has no gradient.

    Source: Nanda 2023, "Attribution Patching"; Syed, Rager & Conmy 2023, "Attribution Patching
    Outperforms Automated Circuit Discovery".
    """
    if not metric.requires_grad:
        rule = "an estimate needs it; a count, argmax, detach() and torch.inference_mode have none."
        hint = "pass estimate=False to compute only exact effects."
        raise BadValue(f"The metric {name} has no gradient.", rule, hint)
    zeros = [call.zeros for call in calls if call.zeros is not None]
    grads = torch.autograd.grad(metric, zeros, allow_unused=True)
    estimates: list[float | None] = []
    with torch.no_grad():
        for group in edits:
            if any(edit.needs_runs for edit in group):
                estimates.append(None)
                continue
            total = 0.0
            for call, grad in zip(calls, grads, strict=True):
                applied = [group[n] for n in in_order(group, call.problem, call.site)]
                if applied and grad is not None:
                    changed = _edited(applied, call).sub(call.out).mul(grad)
                    total += float(changed.sum(dtype=torch.float64))
            estimates.append(total)
    return estimates


def _edited(edits: Sequence[Edit], call: UneditedCall) -> Tensor:
    """Return the output of the call with these edits, from its unedited inputs."""
    problem, inputs = edited_call(edits, call.problem, call.inputs, call.site)
    out = call.out
    if problem is not call.problem or inputs is not call.inputs:
        out = choose(problem, "auto").compute(problem, inputs)
    for edit in edits:
        out = edit.edit_output(out, problem, inputs, call.site)
    return out
