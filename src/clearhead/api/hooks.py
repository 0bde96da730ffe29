"""What follows attention calls: listeners, that see them, editors, that change them, and ranks,
that answer them together.

`watch`, reports and checkpoints listen; `intervene` edits; `distributed.sharded` calls the ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import BadValue
from ..problem.check import Options
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


class Ranks(Protocol):
    """What `distributed.sharded` puts in the place of the engines: q, k and v are shards."""

    @property
    def positions(self) -> Tensor:
        """Where the tokens of this rank stand in the text, (t,)."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str) -> Tensor:
        """The output of these queries over the keys of all ranks."""

    def must_be_one_text(self, ids: Tensor) -> None:
        """Raise `BadValue` if positions that begin anew, as `ids` (B, t) tell, are not the layout's
        doing."""


_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def answered_by(ranks: Ranks) -> Iterator[None]:
    """Inside the `with` block, calls of attention are answered by these."""
    before = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(before)


def ranks_here() -> Ranks | None:
    """Who answers calls of attention together, if the text is cut over ranks."""
    return None if torch.compiler.is_compiling() else _ranks.get()


def must_be_whole(verb: str) -> None:
    """Raises `BadValue` where this process holds a shard of the text: `verb` needs all of it."""
    if ranks_here() is not None:
        raise BadValue(
            f"{verb} was called inside of distributed.sharded.",
            "there a rank holds a part of the text, and only attention is answered by all of them.",
            f"call {verb} outside of it; distributed.look gives statistics of shards.",
        )


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
