"""Record the direct paths from the output of each module to the logits, in one run of a model.

The run cuts the graph of autograd at every module that writes into the residual stream, and takes
the scales of the norms as constants. Then the paths from a module to the logits are linear. So the
part of a module in a logit is its output times the gradient of the logit with respect to it, and
the parts sum to the logit.

Letters: T tokens, H heads, Dv value size, d model size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BadValue
from ..functional.ambient import listening
from ..hf.projections import OutputProjection, input_width, output_projection
from ..problem.problem import Inputs, Problem
from ..torch_state import in_autograd_function
from .layers import Layers
from .norms import is_norm, read_norm


class AttentionCall(NamedTuple):
    """An attention call, and the projection of its heads' output z, (1, H, T, Dv)."""

    module: str
    projection: OutputProjection
    z: Tensor
    problem: Problem
    inputs: Inputs


class HeadsPart(NamedTuple):
    """The output of the projection of an attention call, `written`, which sums its heads."""

    call: AttentionCall
    written: Tensor


class Part(NamedTuple):
    """The output of another module, (1, T, d), after `calls` attention calls."""

    module: str
    calls: int
    written: Tensor


class LinearCall(NamedTuple):
    """A call of a linear module, with its input, which has gradients to the parts."""

    name: str
    module: nn.Module
    input: Tensor
    result: Tensor


class _Frame(NamedTuple):
    """The numbers of calls and parts before a module ran."""

    calls: int
    others: int
    biases: int


class DirectPaths:
    """Collects the parts of a run inside the `with` block of `recorded`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = Layers()
        self.calls = 0
        self.heads: list[HeadsPart] = []
        self.others: list[Part] = []
        self.biases: list[Part] = []  # those of norms
        self.unknown_norms: list[str] = []
        self.last_linear: LinearCall | None = None
        self._expected: dict[str, AttentionCall] = {}  # by the module that sums their heads
        self._frames: list[_Frame] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record a run of the model inside the `with` block."""
        hooks = []
        for name, module in self.model.named_modules():
            before, after = self._hooks(name)
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            with listening(self._on_call):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        for projection, call in self._expected.items():
            raise _not_projected(call.module, projection)

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if not torch.is_grad_enabled() and in_autograd_function():
                raise BadValue(
                    f"A checkpoint with use_reentrant=True runs {name}.",
                    "the parts of a logit follow from gradients, and it records none.",
                    "call model.eval(), or pass use_reentrant=False to the checkpoint.",
                )
            self.layers.enter(name, module, args, kwargs)
            self._frames.append(_Frame(self.calls, len(self.others), len(self.biases)))

        def after(
            module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
        ) -> Any:
            self.layers.leave()
            inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            return self._leave(name, module, inputs, result, self._frames.pop())

        return before, after

    def _on_call(self, problem: Problem, inputs: Inputs, out: Tensor) -> None:
        if not self.layers.inside:
            return
        _, name = self.layers.next_call()
        projection = output_projection(self.model, name, problem.H, problem.Dv)
        if projection.module in self._expected:
            raise _not_projected(name, projection.module)
        detached = Inputs(*(x.detach() for x in inputs))
        call = AttentionCall(name, projection, out.detach(), problem, detached)
        self._expected[projection.module] = call
        self.calls += 1

    def _leave(
        self, name: str, module: nn.Module, inputs: list[Tensor], result: Any, frame: _Frame
    ) -> Any:
        """Return what replaces the output of a module: the same numbers, with another graph."""
        parts = result if isinstance(result, tuple) else (result,)
        if not parts or not isinstance(parts[0], Tensor) or not parts[0].is_floating_point():
            return result
        returned: Tensor = parts[0]
        if (call := self._expected.pop(name, None)) is not None:
            call.projection.check(call.z, result)
            written, returned = _cut(returned)
            self.heads.append(HeadsPart(call, written))
        elif self.calls > frame.calls:
            return result  # a module around attention
        elif is_norm(module):
            norm = read_norm(module, inputs[0], returned) if len(inputs) == 1 else None
            if norm is None:
                self.unknown_norms.append(name)
                written, returned = _cut(returned)
                self.others.append(Part(name, self.calls, written))
            else:
                linear = norm.frozen(inputs[0])
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    written, constant = _cut(bias.expand_as(linear).to(linear.dtype))
                    self.biases.append(Part(name, self.calls, written))
                    linear = linear + constant
                # The numbers of the model, with the gradient of the linear map.
                returned = returned.detach() + (linear - linear.detach()).to(returned.dtype)
        elif not any(True for _ in module.parameters()) or any(map(is_norm, module.modules())):
            return result  # dropout, or a part of a block that includes its norm
        else:
            if input_width(module) is not None and len(inputs) == 1:
                self.last_linear = LinearCall(name, module, inputs[0], returned)
            del self.others[frame.others :], self.biases[frame.biases :]  # those inside the module
            written, returned = _cut(returned)
            self.others.append(Part(name, self.calls, written))
        return (returned, *parts[1:]) if isinstance(result, tuple) else returned


def _not_projected(module: str, projection: str) -> BadValue:
    return BadValue(
        f"{module or 'The model'} called attention, and {projection} did not run after it.",
        "an output projection runs after each attention call.",
        "pass a model whose modules call attention once, and then their output projection.",
    )


def _cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x as a new leaf of the graph, and a copy that the model may change in place."""
    start = x.detach().requires_grad_()
    return start, start.clone()
