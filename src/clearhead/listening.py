"""The window that `watch`, reports and checkpoints look through.

It sees what is asked of attention, and cannot change what is answered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

from .problem import Inputs, Problem

Hear: TypeAlias = Callable[[Problem, Inputs], None]
_listeners: ContextVar[tuple[Hear, ...]] = ContextVar("listeners", default=())


@contextmanager
def listening(hear: Hear) -> Iterator[None]:
    """Call `hear` with every question that is answered inside the `with` block."""
    _listeners.set((*_listeners.get(), hear))
    try:
        yield
    finally:  # the others may have come and gone meanwhile
        _listeners.set(tuple(other for other in _listeners.get() if other is not hear))


def tell(problem: Problem, inputs: Inputs) -> None:
    """A question was answered."""
    for hear in _listeners.get():
        hear(problem, inputs)


def heard(run: Callable[[], object], number: int) -> tuple[tuple[Problem, Inputs] | None, int]:
    """Of the questions that are asked while `run` runs, the one of this number, from 0 (None if
    there is none), and how many there were. The others are let go."""
    kept: list[tuple[Problem, Inputs]] = []
    count = 0

    def hear(problem: Problem, inputs: Inputs) -> None:
        nonlocal count
        if count == number:
            kept.append((problem, inputs))
        count += 1

    with listening(hear):
        run()
    return (kept[0] if kept else None), count
