"""Which layer of a model asks for attention, told by the module that is running."""

import fnmatch
import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from ..errors import BadValue, whole_number


class Layers:
    """Follows a model from module to module (`enter` and `leave` are for `module_hooks`).

    A layer is a place in the model that asks for attention; they are numbered from 0, in the order
    in which they first ask. A module that asks several times in a run is several layers.
    """

    def __init__(self) -> None:
        self.ran = False
        self.names: list[str] = []  # of the module of each layer
        self._thread = threading.get_ident()
        self._inside: list[str] = []  # the modules that are running, outermost first
        self._turns: Counter[str] = Counter()  # how often each module asked in this run
        self._numbers: dict[tuple[str, int], int] = {}  # the layer of each of a module's turns

    def _elsewhere(self) -> bool:
        """Does another thread run the model? A graph cannot tell, and holds only one."""
        return not torch.compiler.is_compiling() and threading.get_ident() != self._thread

    def enter(self, name: str, module: nn.Module, *given: object) -> None:
        if self._elsewhere():
            return
        if not name:  # the model itself: what an interrupted run left behind is over
            self.ran = True
            self._inside.clear()
        if not self._inside:
            self._turns.clear()
        self._inside.append(name)

    def leave(self, *_: object) -> None:
        if self._inside and not self._elsewhere():
            self._inside.pop()

    @property
    def inside(self) -> bool:
        """Is a module of the model running?"""
        return bool(self._inside)

    def asks(self) -> tuple[int, str]:
        """The running module asks: the number of this layer, and the module's name."""
        name = self._inside[-1]
        layer = self._numbers.setdefault((name, self._turns[name]), len(self._numbers))
        if layer == len(self.names):
            self.names.append(name)
        self._turns[name] += 1
        return layer, name

    def last(self) -> tuple[int, str] | None:
        """The layer for which the running module asked last."""
        name = self._inside[-1]
        turn = self._turns[name] - 1
        return (self._numbers[name, turn], name) if (name, turn) in self._numbers else None


def check_layers(layers: Sequence[int | str], model: nn.Module) -> list[int | str]:
    """The layers as whole numbers and patterns. Raises `BadValue` for what is neither, a negative
    number, and a pattern that no module has."""
    names, checked = [name for name, _ in model.named_modules()], list[int | str]()
    for which in layers:
        if isinstance(which, str) and not fnmatch.filter(names, which):
            raise BadValue(
                f"layers has the pattern {which!r}, and no module has such a name.",
                "a pattern is matched against the whole name of a module, with * for any part.",
                f"the modules are {', '.join(names[1:9])}{', ...' if len(names) > 9 else ''}.",
            )
        number = which if isinstance(which, str) else whole_number(which)
        if number is None or (isinstance(number, int) and number < 0):
            raise BadValue(
                f"layers has {which!r}.",
                "a layer is the number of a place in the model that asks, counted from 0, or a "
                "pattern for module names.",
                "pass numbers from 0 on, or strings such as '*.attention'.",
            )
        checked.append(number)
    return checked


def means(layers: Sequence[int | str] | None, layer: int, name: str) -> bool:
    """Is this layer among those named? None means all."""
    return layers is None or any(
        which == layer if isinstance(which, int) else fnmatch.fnmatchcase(name, which)
        for which in layers
    )
