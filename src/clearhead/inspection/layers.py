"""Which layer of a model makes an attention call: the module that is running says so."""

import fnmatch
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import BadType, BadValue, whole_number
from ..functional.ambient import THROUGH_CLEARHEAD
from ..torch_state import compiled_parts, in_backward
from .text_stack import TextStack


def no_attention_call(model: nn.Module, rule: str, hint: str | None = None) -> BadValue:
    """The error for a model that ran, and none of its attention was seen. None for `hint` names
    every way to clearhead."""
    if hint is None:
        hint = (
            f"{THROUGH_CLEARHEAD}; pass a model that is not compiled; some transformers models "
            "compute attention themselves, whatever they are loaded with."
        )
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)  # transformers
    loaded = "" if used in (None, "clearhead") else f" Its attn_implementation is {used!r}."
    return BadValue(
        f"The {type(model).__name__} made no attention call through clearhead.{loaded}",
        rule,
        hint,
    )


def warn_if_compiled(model: nn.Module, stacklevel: int) -> None:
    """Warn if a part of the model is compiled: attention in a graph is not seen."""
    if compiled := compiled_parts(model):
        warnings.warn(
            f"{compiled[0] or f'the {type(model).__name__}'} is compiled: attention calls in its "
            "graph are not recorded",
            stacklevel=stacklevel,
        )


class Layers:
    """Tracks which modules of a model are running (`enter` and `leave` are for `module_hooks`).

    A layer is a place in the model that calls attention. Layers are numbered from 0, in the order
    of their first calls; a module that calls several times in a run is several layers.
    """

    def __init__(self) -> None:
        self.ran = False
        self.names: list[str] = []  # of the module of each layer
        self.texts = TextStack()
        self._thread = threading.get_ident()
        self._running: list[str] = []  # names of modules, outermost first
        self._calls: Counter[str] = Counter()  # of each module, in this run of the model
        self._numbers: dict[tuple[str, int], int] = {}  # the layer of each call of a module
        self._repeated: set[str] = set()  # modules that ran again after a call, in one run

    def _in_other_thread(self) -> bool:
        # Not while torch.compile traces, which knows no threads and runs in one.
        return not torch.compiler.is_compiling() and threading.get_ident() != self._thread

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if self._in_other_thread():
            return
        if not name:  # the model itself: an earlier run may have been interrupted
            self.ran = True
            self._running.clear()
            self.texts.clear()
        if not self._running:
            self._calls.clear()
        if self._calls[name] and not in_backward():
            self._repeated.add(name)
        self._running.append(name)
        self.texts.enter(name, module, args, kwargs)

    def leave(self, *_: object) -> None:
        if self._running and not self._in_other_thread():
            self._running.pop()
            self.texts.leave()

    @property
    def inside(self) -> bool:
        """Is a module of the model running?"""
        return bool(self._running)

    def next_call(self) -> tuple[int, str]:
        """The running module calls attention: the number of its layer, and the module's name."""
        name = self._running[-1]
        layer = self._numbers.setdefault((name, self._calls[name]), len(self._numbers))
        if layer == len(self.names):
            self.names.append(name)
        self._calls[name] += 1
        return layer, name

    def computed_again(self) -> list[int]:
        """The layers that a call in the backward pass may be of, where a checkpoint computes a part
        of the model again: it does not say which part, and may be about a function that calls
        attention outside of any module."""
        if not self._running:
            return list(range(len(self.names)))
        name = self._running[-1]
        layer = self._numbers.get((name, self._calls[name]))
        self._calls[name] += 1
        if layer is None or (name in self._repeated and self._running[0]):
            return [number for number, other in enumerate(self.names) if other == name]
        return [layer]  # it is counted as in the forward pass

    def last_call(self) -> tuple[int, str] | None:
        """The same for the last call that the running module made, if it made one."""
        name = self._running[-1]
        layer = self._numbers.get((name, self._calls[name] - 1))
        return None if layer is None else (layer, name)


def checked_list(name: str, given: object, patterns: bool = False) -> tuple[Any, ...]:
    """A list of whole numbers; with `patterns`, of patterns for module names too. Raises `BadType`
    for anything else, and for an empty list."""
    found: list[int | str | None] = []
    if isinstance(given, Iterable) and not isinstance(given, str):
        found = [x if patterns and isinstance(x, str) else whole_number(x) for x in given]
    if None in found or not found:
        what = "numbers and of patterns for module names" if patterns else "whole numbers"
        example = repr(given) if isinstance(given, (int, str)) else "0, 3"
        raise BadType(
            f"{name} is {given!r}.",
            f"{name} is a list of {what}, not empty; None means all.",
            f"pass for example {name}=[{example}].",
        )
    return tuple(x for x in found if x is not None)


def check_layers(layers: Sequence[int | str], model: nn.Module) -> None:
    """Raises `BadValue` for a negative number, and for a pattern that no module's name matches."""
    names = [name for name, _ in model.named_modules()]
    for which in layers:
        if isinstance(which, str) and not fnmatch.filter(names, which):
            raise BadValue(
                f"layers has the pattern {which!r}, and no module has such a name.",
                "a pattern is matched against the whole name of a module, with * for any part.",
                f"the modules are {', '.join(names[1:9])}{', ...' if len(names) > 9 else ''}.",
            )
        if not isinstance(which, str) and which < 0:
            raise BadValue(
                f"layers has {which!r}.",
                "a layer is the number of a place in the model that calls attention, counted from "
                "0, or a pattern for module names.",
                "pass numbers from 0 on, or strings such as '*.attention'.",
            )


def never_called(layers: Sequence[int | str] | None, names: Sequence[str]) -> list[int | str]:
    """Return those of `layers` that select none of the layers that called attention, given by the
    names of their modules."""
    return [
        which
        for which in layers or ()
        if not any(is_selected([which], layer, name) for layer, name in enumerate(names))
    ]


def is_selected(layers: Sequence[int | str] | None, layer: int, name: str) -> bool:
    """Is this layer, of the module of that name, among `layers`? None means all."""
    return layers is None or any(
        which == layer if isinstance(which, int) else fnmatch.fnmatchcase(name, which)
        for which in layers
    )


@contextmanager
def module_hooks(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Inside the `with` block, call ``enter(name, module, args, kwargs)`` before each module of the
    model runs, and ``leave(module, args, result)`` after it, also after an error."""
    hooks = []
    for name, module in model.named_modules():
        before = _Hook(partial(enter, name))
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(_Hook(leave), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Hook:
    """A hook that does nothing in a copy of the module, such as one saved to a checkpoint."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, *given: object) -> None:
        self.run(*given)

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, (_do_nothing,)


def _do_nothing(*given: object) -> None:
    pass
