"""Follow a run of a model: its modules, its attention calls, and their layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...core.functional.ambient import Follower, following
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

        With `attention_only`, modules that cannot call attention are not followed.
        """
        with module_hooks(self.model, self.enter, self.leave, attention_only), following(self):
            yield

    def enter(self, name: str, *ran: Any) -> None:
        """Note that a module begins, with the arguments of `Layers.enter`."""
        self.running.enter(name, *ran)

    def leave(self, module: nn.Module, args: Sequence[Any], result: Any) -> Any:
        """Note that a module returns. Returns what replaces its result, or None."""
        self.running.leave(module, args, result)
        return None
