"""Record the direct paths from the output of each module to the logits, in one run of a model.

The run cuts the graph of autograd at every module that writes into the residual stream, and takes
the scales of the norms as constants. Then the paths from a module to the logits are linear. So the
part of a module in a logit is its output times the gradient of the logit with respect to it, and
the parts sum to the logit.

Letters: T tokens, H heads, Dv value size, d model size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.torch_state import in_autograd_function
from ...hf.projections import input_width
from ..follow.run import AttentionCall, ModuleRun, RecordedRun
from .norms_and_rotations import is_norm, read_norm


class HeadsPart(NamedTuple):
    """The output of the projection of an attention call, `written`, which sums its heads."""

    call: AttentionCall
    written: Tensor


class Part(NamedTuple):
    """The output of another module, (1, T, d), after `calls` attention calls."""

    module: str
    calls: int
    written: Tensor


class _Before(NamedTuple):
    """The numbers of calls and parts before a module ran."""

    calls: int
    others: int
    biases: int


class DirectPaths(RecordedRun):
    """Collects the parts of a run inside the `with` block of `recorded`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls = 0
        self.heads: list[HeadsPart] = []
        self.others: list[Part] = []
        self.biases: list[Part] = []  # those of norms
        self.unknown_norms: list[str] = []
        self.last_linear: ModuleRun | None = None  # its input has gradients to the parts

    def state(self) -> _Before:
        return _Before(self.calls, len(self.others), len(self.biases))

    def enter(self, name: str, *arguments: Any) -> None:
        super().enter(name, *arguments)
        if not torch.is_grad_enabled() and in_autograd_function():
            rule = "the parts of a logit follow from gradients, and it records none."
            hint = "call model.eval(), or pass use_reentrant=False to the checkpoint."
            raise BadValue(f"A checkpoint with use_reentrant=True runs {name}.", rule, hint)

    def on_call(self, call: AttentionCall) -> None:
        self.calls += 1

    def after(self, ran: ModuleRun) -> Tensor | None:
        """Return what replaces the output of a module: the same numbers, with another graph."""
        name, module, inputs, result, call, before = ran
        if not result.is_floating_point():
            return None
        if call is not None:
            written, returned = cut(result)
            self.heads.append(HeadsPart(call, written))
        elif self.calls > before.calls:
            return None  # a module around attention
        elif is_norm(module):
            norm = read_norm(module, inputs[0], result) if len(inputs) == 1 else None
            if norm is None:
                self.unknown_norms.append(name)
                written, returned = cut(result)
                self.others.append(Part(name, self.calls, written))
            else:
                linear = norm.frozen(inputs[0])
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    written, constant = cut(bias.expand_as(linear).to(linear.dtype))
                    self.biases.append(Part(name, self.calls, written))
                    linear = linear + constant
                # The numbers of the model, with the gradient of the linear map.
                returned = result.detach() + (linear - linear.detach()).to(result.dtype)
        elif not any(True for _ in module.parameters()) or any(map(is_norm, module.modules())):
            return None  # dropout, or a part of a block that includes its norm
        elif _only_scales(module, inputs, result):
            return None  # what others wrote, which autograd follows
        else:
            if input_width(module) is not None and len(inputs) == 1:
                self.last_linear = ran
            del self.others[before.others :], self.biases[before.biases :]  # inside the module
            written, returned = cut(result)
            self.others.append(Part(name, self.calls, written))
        return returned


def _only_scales(module: nn.Module, inputs: Sequence[Tensor], result: Tensor) -> bool:
    """Return whether a module multiplies each feature by a number, as a layer scale does."""
    scales = [*module.parameters()]
    if len(scales) != 1 or scales[0].dim() != 1 or len(inputs) != 1:
        return False
    return inputs[0].shape == result.shape and torch.equal(inputs[0] * scales[0], result)


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as a new leaf of the graph, and a copy that the model may change in place."""
    start = x.detach().requires_grad_()
    return start, start.clone()
