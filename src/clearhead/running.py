"""Which modules of a model are running, as their hooks tell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn


@contextmanager
def following(
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
