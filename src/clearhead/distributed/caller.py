"""Who calls attention inside of `sharded`: the modules and checkpoints on Python's stack."""

import inspect
import sys
from dataclasses import dataclass, field
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from ..errors import BadValue
from ..torch_state import in_backward

CHECKPOINT = inspect.unwrap(checkpoint).__code__


@dataclass(frozen=True, eq=False)
class Caller:
    """The frames of the call, innermost first."""

    modules: list[FrameType] = field(default_factory=list)  # each runs the forward of a module
    functions: list[FunctionCtx] = field(default_factory=list)  # autograd functions that run it
    in_checkpoint: bool = False  # without use_reentrant

    @property
    def layer(self) -> str:
        """The name of the module that calls, in the model; "" outside of modules."""
        return _name(self.modules[0], self.modules[-1]) if self.modules else ""

    def given(self, name: str) -> FrameType | None:
        """The outermost module that takes an argument of this name."""
        return next((f for f in reversed(self.modules) if name in f.f_code.co_varnames), None)


def find_caller(block: FrameType | None) -> Caller:
    """Who calls, up to the frame that entered the block."""
    modules, functions, in_checkpoint = [], [], False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not block:
        code = frame.f_code
        if code is CHECKPOINT:
            in_checkpoint = True
        elif code.co_name in ("forward", "backward") and code.co_argcount:
            first = code.co_varnames[0]
            if first == "self":
                if code.co_name == "forward" and isinstance(frame.f_locals["self"], nn.Module):
                    modules.append(frame)
            elif isinstance(given := frame.f_locals.get(first), FunctionCtx):
                functions.append(given)
        frame = frame.f_back
    return Caller(modules, functions, in_checkpoint)


_names: "WeakKeyDictionary[nn.Module, dict[int, str]]" = WeakKeyDictionary()


def _name(inner: FrameType, outer: FrameType) -> str:
    module, root = inner.f_locals["self"], outer.f_locals["self"]
    known = _names.get(root)
    if known is None or id(module) not in known:
        known = _names[root] = {id(part): name for name, part in root.named_modules()}
    return known.get(id(module), "") or type(module).__name__


def check_arguments(caller: Caller, positions: Tensor, any_mask: bool) -> None:
    """Raises `BadValue` for a model of transformers that was given labels, or not the positions of
    its tokens. With `any_mask` texts are packed, whose positions may begin anew."""
    if in_backward():  # a checkpoint repeats a layer, not the model
        return
    labels = caller.given("labels")
    if labels is not None and labels.f_locals.get("labels") is not None:
        others = labels.f_locals.get("kwargs")
        if not (isinstance(others, dict) and others.get("shift_labels") is not None):
            raise BadValue(
                "The model was given labels= inside of distributed.sharded.",
                "it would compare each token with the next one of this rank's part, which is not "
                "the next one of the text where two parts meet.",
                "shift the labels of the whole text, and compute the loss from the logits and "
                "part.shard(shifted_labels).",
            )
    takes = caller.given("position_ids")
    if takes is None:
        return
    given = takes.f_locals.get("position_ids")
    count = torch.arange(len(positions))
    missing = given is None
    if isinstance(given, Tensor) and not any_mask and given.shape[-1] == len(positions):
        given = given.cpu()
        missing = bool((given == count).all()) and not torch.equal(positions, count)
    if missing:
        raise BadValue(
            "The model was given no position_ids inside of distributed.sharded.",
            "it would count this rank's tokens from 0, and they are elsewhere in the text.",
            "pass position_ids=part.positions[None]; while decoding, the positions of the new "
            "tokens.",
        )
