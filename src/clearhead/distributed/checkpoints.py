"""Find the activation checkpoints around a call, and replace the functions that recompute them.

A checkpoint is the context of an autograd function, whose backward runs its layers again (as with
`use_reentrant=True`), or a frame of `torch.utils.checkpoint` (with `use_reentrant=False`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

from torch._C import _autograd
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from ..core.errors import BadValue
from ..core.torch_state import checkpoint_with, running_functions


def open_checkpoints() -> list[Any]:
    """Return the checkpoints whose forward pass runs now in this thread."""
    hooks: list[Any] = []  # on saved tensors; torch shows only the last
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        _autograd._push_saved_tensors_default_hooks(pack, unpack)
    functions = [context for context, method in running_functions() if method == "forward"]
    frames = [_frame(pack) for pack, _ in hooks if pack.__module__ == checkpoint.__name__]
    return [opened for opened in functions + frames if opened is not None]


def _frame(pack: Any) -> Any:
    """Return the frame of a checkpoint from its hook, or None while it recomputes."""
    if pack.__qualname__.startswith("_recomputation_hook"):
        return None
    if (frame := checkpoint_with(pack)) is not None:
        return frame
    gave = "torch.utils.checkpoint ran inside distributed.sharded, in a form that is not known."
    rule = "a checkpoint recomputes attention calls, which need the ranks of the block."
    raise BadValue(gave, rule, "use no checkpoints, or another version of torch.")


def replace(opened: Any, recompute: Callable[..., Any]) -> None:
    """Let a checkpoint call ``recompute(run, ...)`` where it called ``run(...)``, only once."""
    is_function = isinstance(opened, FunctionCtx)
    name = "apply" if is_function else "recompute_fn"
    if not isinstance(run := vars(opened).get(name), partial):
        run = partial(_backward, ref(opened)) if is_function else run  # without a cycle
        setattr(opened, name, partial(recompute, run))


def _backward(function: Any, *gradients: Any) -> Any:
    context = function()
    return type(context).apply(context, *gradients)
