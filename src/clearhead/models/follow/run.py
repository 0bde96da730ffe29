"""Follow a run of a model: its modules, its attention calls, their layers and output projections.

Letters: T tokens, H heads, Dv value size, d model size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.functional.ambient import FollowedCall, Follower, following
from ...core.problem.problem import Inputs, Problem
from ...hf.projections import OutputProjection, output_projection
from .layers import Layers, module_hooks


class ModelFollower(Follower):
    """Follows the attention calls of a model, and the modules that make them.

    A subclass overrides `begin`, which returns the statistics to compute with the output of a call,
    and `receive`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running = Layers()

    @contextmanager
    def followed(self, attention_only: bool = True) -> Iterator[None]:
        """Follow the model inside the `with` block.

        With `attention_only`, modules that cannot call attention are not followed. Nor is a run of
        the model in another thread, which `running` notes.
        """
        layers = self.running

        def enter(*ran: Any) -> None:
            (layers if layers.texts.is_other_thread() else self).enter(*ran)

        def leave(*ran: Any) -> Any:
            return None if layers.texts.is_other_thread() else self.leave(*ran)

        with module_hooks(self.model, enter, leave, attention_only), following(self):
            yield

    def enter(self, name: str, *ran: Any) -> None:
        """Note that a module begins, with the arguments of `Layers.enter`."""
        self.running.enter(name, *ran)

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> Any:
        """Note that a module returns. Returns what replaces its result, or None."""
        self.running.leave(module, args, result)
        return None


class AttentionCall(NamedTuple):
    """An attention call, and the projection of its heads' output z, (1, H, T, Dv)."""

    module: str
    projection: OutputProjection
    z: Tensor
    problem: Problem
    inputs: Inputs


class ModuleRun(NamedTuple):
    """A module that ran, with the tensors passed to it and its first output.

    `projects` is the call whose heads it projects, or None. `before` is `RecordedRun.state` before
    it ran.
    """

    name: str
    module: nn.Module
    inputs: Sequence[Tensor]
    result: Tensor
    projects: AttentionCall | None
    before: Any


class RecordedRun(ModelFollower, ABC):
    """Follows the modules that run inside the `with` block of `recorded`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._running: list[tuple[str, list[Tensor], Any]] = []
        self._expected: dict[str, AttentionCall] = {}  # by the module that sums their heads

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Follow a run of the model inside the `with` block.

        Raises `BadValue` if a module calls attention twice before its output projection, or if the
        projection does not run, or computes something else.
        """
        with self.followed(attention_only=False):
            yield
        for projection, call in self._expected.items():
            raise _not_projected(call.module, projection)

    def state(self) -> Any:
        """Return what `after` needs from the time before a module runs."""
        return None

    @abstractmethod
    def on_call(self, call: AttentionCall) -> None:
        """Record an attention call, whose projection has not run."""

    @abstractmethod
    def after(self, ran: ModuleRun) -> Tensor | None:
        """Record a module that ran. Returns the tensor that replaces its output, or None."""

    def enter(self, name: str, *ran: Any) -> None:
        super().enter(name, *ran)
        _, args, *keywords = ran  # `NO_KEYWORDS` are left out
        passed = (*args, *(x for kwargs in keywords for x in kwargs.values()))
        self._running.append((name, [x for x in passed if isinstance(x, Tensor)], self.state()))

    def receive(self, call: FollowedCall) -> None:
        if not self.running.inside:
            return
        problem = call.problem
        _, name = self.running.next_call()
        projection = output_projection(self.model, name, problem.H, problem.Dv)
        if projection.module in self._expected:
            raise _not_projected(name, projection.module)
        inputs = Inputs(*(x.detach() for x in call.inputs))
        attention = AttentionCall(name, projection, call.out.detach(), problem, inputs)
        self._expected[projection.module] = attention
        self.on_call(attention)

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> Any:
        super().leave(module, args, result)
        name, inputs, before = self._running.pop()
        parts = result if isinstance(result, tuple) else (result,)
        if not parts or not isinstance(parts[0], Tensor):
            return None
        projects = self._expected.pop(name, None)
        if projects is not None:
            projects.projection.check(projects.z, result)
        replaced = self.after(ModuleRun(name, module, inputs, parts[0], projects, before))
        if replaced is None or not isinstance(result, tuple):
            return replaced
        return (replaced, *parts[1:])


def _not_projected(module: str, projection: str) -> BadValue:
    gave = f"{module or 'The model'} called attention, and {projection} did not run after it."
    hint = "pass a model whose modules call attention once, and then their output projection."
    return BadValue(gave, "an output projection runs after each attention call.", hint)
