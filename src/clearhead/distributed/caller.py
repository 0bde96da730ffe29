"""Find the modules and checkpoints on Python's stack that call attention inside `sharded`."""

import inspect
import sys
from dataclasses import dataclass, field
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from ..core.errors import BadValue
from ..core.torch_state import in_backward

GENERATION = "transformers.generation.utils"
CHECKPOINT = inspect.unwrap(checkpoint).__code__


@dataclass(frozen=True, eq=False)
class Caller:
    """The modules and checkpoints around a call, innermost first."""

    modules: list[FrameType] = field(default_factory=list)  # frames of modules' `forward`
    functions: list[FunctionCtx] = field(default_factory=list)  # autograd functions that run them
    in_checkpoint: bool = False  # one without use_reentrant
    in_generate: bool = False  # of transformers

    @property
    def layer(self) -> str:
        """The name in the model of the module that calls; "" outside modules."""
        return _name(self.modules[0], self.modules[-1]) if self.modules else ""

    def module_with(self, name: str) -> FrameType | None:
        """Return the frame of the outermost module that has an argument of this name."""
        return next((f for f in reversed(self.modules) if name in f.f_code.co_varnames), None)


def find_caller(block: FrameType | None) -> Caller:
    """Find the caller on the stack, up to the frame that entered the block."""
    modules, functions, in_checkpoint, in_generate = [], [], False, False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not block:
        code = frame.f_code
        in_generate |= frame.f_globals.get("__name__") == GENERATION
        if code is CHECKPOINT:
            in_checkpoint = True
        elif code.co_name in ("forward", "backward") and code.co_argcount:
            first = code.co_varnames[0]
            if first == "self":
                if code.co_name == "forward" and isinstance(frame.f_locals["self"], nn.Module):
                    modules.append(frame)
            elif isinstance(context := frame.f_locals.get(first), FunctionCtx):
                functions.append(context)
        frame = frame.f_back
    return Caller(modules, functions, in_checkpoint, in_generate)


_names: "WeakKeyDictionary[nn.Module, dict[int, str]]" = WeakKeyDictionary()


def _name(inner: FrameType, outer: FrameType) -> str:
    module, root = inner.f_locals["self"], outer.f_locals["self"]
    known = _names.get(root)
    if known is None or id(module) not in known:
        known = _names[root] = {id(part): name for name, part in root.named_modules()}
    return known.get(id(module), "") or type(module).__name__


def must_not_generate(caller: Caller) -> None:
    """Raise `BadValue` inside `generate` of transformers."""
    if caller.in_generate:
        raise BadValue(
            "generate() of transformers ran inside distributed.sharded.",
            "it chooses a token at the end of each rank's part, and counts positions in the part.",
            "compute the text, choose a token from part.last(logits), and run the model on one new "
            "token at a time inside part.decoding(length).",
        )


def check_arguments(caller: Caller, positions: Tensor, any_mask: bool) -> None:
    """Raise `BadValue` for a transformers model that gets labels, or no positions of its tokens.
    With `any_mask` texts may be packed, and their positions may start again."""
    if in_backward():  # a checkpoint recomputes a layer, not the model
        return
    labels = caller.module_with("labels")
    if labels is not None and labels.f_locals.get("labels") is not None:
        others = labels.f_locals.get("kwargs")
        if not (isinstance(others, dict) and others.get("shift_labels") is not None):
            raise BadValue(
                "The model got labels= inside distributed.sharded.",
                "a model shifts labels by one token, which is wrong at the ends of a rank's part.",
                "shift the labels of the whole text, and compute the loss from the logits and "
                "part.shard(shifted_labels).",
            )
    module = caller.module_with("position_ids")
    if module is None:
        return
    passed = module.f_locals.get("position_ids")
    count = torch.arange(len(positions))
    missing = passed is None
    if isinstance(passed, Tensor) and not any_mask and passed.shape[-1] == len(positions):
        passed = passed.cpu()
        missing = bool((passed == count).all()) and not torch.equal(positions, count)
    if missing:
        raise BadValue(
            "The model got no position_ids inside distributed.sharded.",
            "a model counts its tokens from 0, but this rank's part starts elsewhere in the text.",
            "pass position_ids=part.positions[None], or while decoding the positions of the new "
            "tokens.",
        )
