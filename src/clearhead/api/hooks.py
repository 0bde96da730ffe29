"""What follows attention calls: listeners, that see them, and editors, that change them.

`watch`, reports and checkpoints listen; `intervene` edits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ..problem.problem import Inputs, Problem

Hear: TypeAlias = Callable[[Problem, Inputs, Tensor], None]
_listeners: ContextVar[tuple[Hear, ...]] = ContextVar("listeners", default=())


class Editor(Protocol):
    """What `intervene` puts at the door."""

    def question(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The question that is asked instead."""

    def same_question(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The same for a question about the weights of the call that came last."""

    def shown(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The edited question as who looks at its weights sees it."""

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        """The output that is given instead."""


_editors: ContextVar[tuple[Editor, ...]] = ContextVar("editors", default=())


@contextmanager
def listening(on_call: Hear) -> Iterator[None]:
    """Call `on_call` with every question that is answered inside the `with` block, and the
    output."""
    _listeners.set((*_listeners.get(), on_call))
    try:
        yield
    finally:  # the others may have come and gone meanwhile
        _listeners.set(tuple(other for other in _listeners.get() if other is not on_call))


def notify(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """A question was answered."""
    if listeners := _listeners.get():
        problem, inputs = shown(problem, inputs)
        for on_call in listeners:
            on_call(problem, inputs, out)


def capture_call(
    run: Callable[[], object], number: int
) -> tuple[tuple[Problem, Inputs] | None, int]:
    """Of the questions that are asked while `run` runs, the one of this number, from 0 (None if
    there is none), and how many there were. The others are let go."""
    kept: list[tuple[Problem, Inputs]] = []
    count = 0

    def on_call(problem: Problem, inputs: Inputs, out: Tensor) -> None:
        nonlocal count
        if count == number:
            kept.append((problem, inputs))
        count += 1

    with listening(on_call):
        run()
    return (kept[0] if kept else None), count


@contextmanager
def editing(editor: Editor) -> Iterator[None]:
    """Let `editor` change every question and answer inside the `with` block, after the others."""
    _editors.set((*_editors.get(), editor))
    try:
        yield
    finally:
        _editors.set(tuple(other for other in _editors.get() if other is not editor))


def editors() -> tuple[Editor, ...]:
    """Who changes calls now, outermost first. A compiled graph is not changed."""
    return () if torch.compiler.is_compiling() else _editors.get()


def shown(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The question that was edited last, as who looks at its weights sees it."""
    for editor in editors():
        problem, inputs = editor.shown(problem, inputs)
    return problem, inputs


@contextmanager
def module_hooks(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Inside the `with` block, call ``enter(name, module, args, kwargs)`` where a module of the
    model begins, and ``leave(module, args, result)`` where it ends, however it ends."""
    hooks = []
    for name, module in model.named_modules():
        begins = _Hook(partial(enter, name))
        hooks.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        hooks.append(module.register_forward_hook(_Hook(leave), always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Hook:
    """What listens at a module. A checkpoint that is saved meanwhile, or a copy, hears nothing."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, *given: object) -> None:
        self.run(*given)

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, (_deaf,)


def _deaf(*given: object) -> None:
    pass
