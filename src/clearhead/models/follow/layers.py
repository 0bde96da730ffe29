"""Find the layer that makes an attention call, from the module that is running."""

import fnmatch
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from ...core.errors import BadType, BadValue, is_iterable, kind_of, whole_number
from ...core.functional.ambient import THROUGH_CLEARHEAD, must_not_be_sharded
from ...core.torch_state import compiled_parts, in_backward
from ...hf.inspect_model import names_of
from .refused_models import heads_must_be_whole
from .text_stack import TextStack

SOME_NEVER_DO = "some transformers models always compute attention themselves"
_LIBRARIES = ("torch.nn.modules.", "transformers.")


def no_attention_call(model: nn.Module, rule: str, hint: str | None = None) -> BadValue:
    """Return the error for a model that ran without an attention call through clearhead.

    None for `hint` lists all ways to call clearhead.
    """
    if hint is None:
        hint = f"{THROUGH_CLEARHEAD}; pass a model that is not compiled; {SOME_NEVER_DO}."
    used = getattr(getattr(model, "config", None), "_attn_implementation", None)  # transformers
    loaded = "" if used in (None, "clearhead") else f" Its attn_implementation is {used!r}."
    gave = f"The {type(model).__name__} made no attention call through clearhead.{loaded}"
    return BadValue(gave, rule, hint)


def ran_in_other_thread(model: nn.Module, rule: str) -> BadValue:
    """Return the error for a model that ran only in threads that did not open the block."""
    hint = "run it in the thread of the with block, or open the block in the other thread."
    return BadValue(f"The {type(model).__name__} ran in another thread.", rule, hint)


# torch adds a hook before it notes that the hook takes keywords: a thread that runs the model in
# between calls it without them.
NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


class MissingLayer(BadValue):
    """A layer that is named made no attention call while the model ran."""


def refuse_compiled(model: nn.Module) -> None:
    """Raise `BadValue` if the model, or a part of it, is compiled."""
    if compiled := compiled_parts(model):
        gave = f"The {type(model).__name__} is compiled: {compiled[0] or 'the model itself'}."
        rule = "a compiled graph keeps the attention with which it was compiled."
        raise BadValue(gave, rule, "pass the model that is not compiled.")


def warn_if_compiled(model: nn.Module, stacklevel: int) -> None:
    """Warn if a part of the model is compiled, because attention in a graph is not recorded."""
    if compiled := compiled_parts(model):
        text = f"{compiled[0] or f'the {type(model).__name__}'} is compiled"
        warnings.warn(
            f"{text}: attention calls in its graph are not recorded", stacklevel=stacklevel
        )


class Layers:
    """Tracks which modules of a model are running. `enter` and `leave` are for `module_hooks`.

    A layer is an attention call of a module. Layers are numbered from 0, in the order of their
    first calls; a module that calls attention several times in a run is several layers.
    """

    def __init__(self) -> None:
        self.ran = False
        self.ran_in_other_thread = False
        self.names: list[str] = []  # the module of each layer
        self.texts = TextStack()
        self._running: list[str] = []  # names of modules, outermost first
        self._calls: Counter[str] = Counter()  # by module, in this run of the model
        self._numbers: dict[tuple[str, int], int] = {}  # the layer of each call of a module
        self._repeated: set[str] = set()  # modules that ran again after a call, in one run

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any],
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
    ) -> None:  # fmt: skip
        if self.texts.is_other_thread():
            self.ran_in_other_thread = True
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

    def leave(self, *ran: Any) -> None:
        if self._running and not self.texts.is_other_thread():
            self._running.pop()
            self.texts.leave(*ran)

    @property
    def inside(self) -> bool:
        """Whether a module of the model is running."""
        return bool(self._running)

    @property
    def current(self) -> str | None:
        """The name of the module that is running; None outside the model."""
        return self._running[-1] if self._running and not self.texts.is_other_thread() else None

    def next_call(self) -> tuple[int, str]:
        """Count an attention call of the running module. Returns the layer and the module name.

        Raises `BadValue` if the heads of the module are divided over ranks.
        """
        name = self._running[-1]
        if self.texts.running:
            heads_must_be_whole(name, self.texts.running[-1].module)
        layer = self._numbers.setdefault((name, self._calls[name]), len(self._numbers))
        if layer == len(self.names):
            self.names.append(name)
        self._calls[name] += 1
        self.texts.calls += 1
        return layer, name

    def recomputed(self) -> list[int]:
        """Return the layers that a checkpoint may recompute with this call.

        There may be several: a checkpoint does not reveal which part of the model it recomputes,
        and it may wrap a function that calls attention outside any module.
        """
        if not self._running:
            return list(range(len(self.names)))
        name = self._running[-1]
        layer = self._numbers.get((name, self._calls[name]))
        self._calls[name] += 1
        if layer is None or (name in self._repeated and self._running[0]):
            return [number for number, other in enumerate(self.names) if other == name]
        return [layer]

    def last_call(self) -> tuple[int, str] | None:
        """Return the layer and module name of the running module's last call, or None."""
        name = self._running[-1]
        layer = self._numbers.get((name, self._calls[name] - 1))
        return None if layer is None else (layer, name)


def must_be_module(verb: str, model: object, rule: str, more: str = "") -> None:
    """Raise `BadType` for anything but a module. `more` follows the hint."""
    if not isinstance(model, nn.Module):
        raise BadType(f"{verb} got {kind_of(model)}.", rule, f"pass a torch.nn.Module{more}.")


def must_be_runnable(verb: str, model: object, rule: str, more: str = "") -> None:
    """Raise an error unless `verb` got a module that is not compiled, and not inside `sharded`."""
    must_be_module(verb, model, rule, more)
    must_not_be_sharded(verb)
    refuse_compiled(cast(nn.Module, model))


def checked_list(name: str, value: object, patterns: bool = False) -> tuple[Any, ...] | None:
    """Return a list of whole numbers, and with `patterns` of patterns for module names, as a tuple.

    None stays None. Raises `BadType` for anything else, and for an empty list.
    """
    if value is None:
        return None
    items: list[int | str | None] = []
    if is_iterable(value) and not isinstance(value, str):
        items = [x if patterns and isinstance(x, str) else whole_number(x) for x in value]
    if None in items or not items:
        what = "numbers and patterns for module names" if patterns else "whole numbers"
        example = repr(value) if isinstance(value, (int, str)) else "0, 3"
        rule = f"{name} is a non-empty list of {what}; None means all."
        raise BadType(f"{name} is {value!r}.", rule, f"pass for example {name}=[{example}].")
    return tuple(x for x in items if x is not None)


def check_layers(layers: Sequence[int | str] | None, model: nn.Module) -> None:
    """Raise `BadValue` for a negative number, and for a pattern that matches no module name."""
    names = [name for name, _ in model.named_modules()] if layers else []
    for which in layers or ():
        if isinstance(which, str) and not fnmatch.filter(names, which):
            gave = f"layers has the pattern {which!r}, which matches no module."
            rule = "a pattern must match the complete name of a module; * matches any part."
            hint = f"the modules are {', '.join(names[1:9])}{', ...' if len(names) > 9 else ''}."
            raise BadValue(gave, rule, hint)
        if not isinstance(which, str) and which < 0:
            rule = "a layer is a number, counted from 0, or a pattern for module names."
            hint = "pass numbers from 0 on, or strings such as '*.attention'."
            raise BadValue(f"layers has {which!r}.", rule, hint)


def never_called(layers: Sequence[int | str] | None, names: Sequence[str]) -> list[int | str]:
    """Return the items of `layers` that select no layer; `names` are the modules of all layers."""
    return [
        which
        for which in layers or ()
        if not any(is_selected([which], layer, name) for layer, name in enumerate(names))
    ]


def is_selected(layers: Sequence[int | str] | None, layer: int, name: str) -> bool:
    """Return whether `layers` selects this layer of the module `name`. None selects all."""
    return layers is None or any(
        which == layer if isinstance(which, int) else fnmatch.fnmatchcase(name, which)
        for which in layers
    )


@contextmanager
def module_hooks(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., Any],
    attention_only: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Call hooks around each module of the model that runs inside the `with` block.

    They are ``enter(name, module, args, kwargs)`` before it, and ``leave(module, args, result)``
    after it, also after an error. `leave` returns what replaces the result, or None. With
    `attention_only`, modules that cannot call attention, such as nn.Linear, get no hooks.
    """
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not (attention_only and name and _calls_nothing(module)):
                before, after = _Hook(partial(enter, name)), _Hook(leave)
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, always_call=True))
        yield


def _calls_nothing(module: nn.Module) -> bool:
    """Is it a module of torch or transformers that calls only such modules, no function of a user?

    A container may get children later. A module of transformers is a norm, an activation, positions
    or made of these, as a feed-forward network, if its name and code name no attention.
    """
    of = type(module)
    return (  # a function that wraps another has its `__module__`
        of.__module__.startswith(_LIBRARIES)
        and getattr(of.forward, "__globals__", {"__name__": ""})["__name__"].startswith(_LIBRARIES)
        and not _names_attention(of)  # type: ignore[arg-type]  # a class has a hash
        and not of.__module__.endswith(".container")
        and all(map(_calls_nothing, module.children()))
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


@lru_cache(maxsize=1024)
def _names_attention(kind: type[nn.Module]) -> bool:
    names = " ".join([kind.__name__, *names_of(kind)]).lower()
    return "attention" in names or "attn" in names


class _Hook:
    """A hook that does nothing in a copy of the module, such as one saved to a checkpoint."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, *arguments: object) -> Any:
        return self.run(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, (_do_nothing,)


def _do_nothing(*arguments: object) -> None: ...
