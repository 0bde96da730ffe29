"""The effect of an edit on a metric, estimated from gradients of the unedited run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines import choose
from ..errors import BadValue
from ..functional.ambient import EditedCall
from ..problem.problem import Inputs, Problem
from ..torch_state import in_backward
from .edits.edit import Edit, Here, in_order
from .layers import Layers


class UneditedCall(NamedTuple):
    """An attention call of the unedited run: the problem, its output, and zeros that were added to
    the output so that its gradient is known."""

    here: Here
    problem: Problem
    inputs: Inputs
    out: Tensor
    zeros: Tensor | None


class Recorder:
    """An editor that changes nothing and keeps every call; with `grad`, for `estimate`."""

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.layers, self.calls = Layers(), list[UneditedCall]()

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        if not self.layers.inside or in_backward():  # where a checkpoint repeats a call
            return EditedCall(problem, inputs)
        layer, name = self.layers.next_call()
        number = sum(call.here.layer == layer for call in self.calls)
        here = Here(layer, name, number, self.layers.texts.positions(problem))
        return _RecordedCall(problem, inputs, here, self)

    def edit_again(self, problem: Problem, inputs: Inputs) -> EditedCall:
        return EditedCall(problem, inputs)


@dataclass(frozen=True, eq=False)
class _RecordedCall(EditedCall):
    here: Here
    recorder: Recorder

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        grad = self.recorder.grad
        if grad and not torch.is_grad_enabled():
            raise BadValue(
                f"Layer {self.here.layer} computes attention without gradients.",
                "an estimate is made of gradients, which no_grad and a checkpoint with "
                "use_reentrant=True do not record.",
                "pass estimate=False, or use_reentrant=False to the checkpoint.",
            )
        detached = Inputs(*(x.detach() for x in inputs)) if grad else inputs
        zeros = torch.zeros_like(out, requires_grad=True) if grad else None
        call = UneditedCall(self.here, problem, detached, out.detach(), zeros)
        self.recorder.calls.append(call)
        return out if zeros is None else out + zeros


def estimate(
    edits: Sequence[Sequence[Edit]], calls: Sequence[UneditedCall], metric: Tensor, name: str
) -> list[float]:
    """For each list of edits, the sum over calls of (edited output - output) . d metric / d output,
    where the edited output is that of the call alone, given the inputs of the unedited run.

    Raises `BadValue` for a metric, called `name`, that has no gradient.

    Source: Nanda 2023, "Attribution Patching"; Syed, Rager & Conmy 2023, "Attribution Patching
    Outperforms Automated Circuit Discovery".
    """
    if not metric.requires_grad:
        raise BadValue(
            f"The metric {name} has no gradient.",
            "an estimate is made of gradients, which a count, an argmax, detach() and "
            "torch.inference_mode do not have.",
            "pass estimate=False for the exact effects alone.",
        )
    zeros = [call.zeros for call in calls if call.zeros is not None]
    grads = torch.autograd.grad(metric, zeros, allow_unused=True)
    found = []
    with torch.no_grad():
        for group in edits:
            total = 0.0
            for call, grad in zip(calls, grads, strict=True):
                applied = [group[n] for n in in_order(group, call.problem, call.here)]
                if applied and grad is not None:
                    changed = _edited(applied, call).sub(call.out).mul(grad)
                    total += float(changed.sum(dtype=torch.float64))
            found.append(total)
    return found


def _edited(edits: Sequence[Edit], call: UneditedCall) -> Tensor:
    """What the call alone gives with these edits."""
    problem, inputs, out = call.problem, call.inputs, call.out
    for edit in edits:
        problem, inputs = edit.edit_problem(problem, inputs, call.here)
    if problem is not call.problem or inputs is not call.inputs:
        out = choose(problem, "auto").answer(problem, inputs).output
    for edit in edits:
        out = edit.edit_output(out, problem, inputs, call.here)
    return out
