"""Record what a rank does inside a `sharded` block; the ranks compare it at the end.

The modules and checkpoints that call attention are those on Python's stack.
"""

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from ..core.errors import AttentionError, BadValue
from ..core.functional.ambient import THROUGH_CLEARHEAD, compiled_in_block
from ..core.torch_state import has_values, in_backward
from .handshake import UNKNOWN, Kind, agree, digest_of_text, send_error
from .transport import Group, GroupTransport, history_of

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


class Checkpoint:
    """An activation checkpoint that called attention. Autograd's graph refers to it, and it is
    removed from its set when backward reaches it."""


@dataclass(eq=False)
class Block:
    """The state of one `sharded` block on this rank."""

    thread: int = field(default_factory=threading.get_ident)
    frame: FrameType | None = None  # the one that entered the block
    text: bytes = UNKNOWN  # a digest of the first tensor that was cut
    called: bool = False  # whether a model called attention
    refused: BadValue | None = None  # an error that is not sent before the block ends
    checkpoints: "WeakSet[Checkpoint]" = field(default_factory=WeakSet)

    @contextmanager
    def compared(self, group: Group, timeout: float) -> Iterator[None]:
        """Compare at the end of the `with` block what the ranks did inside. Raises `BadValue` on
        every rank if one left the block by an error, or did not make the same calls."""
        history = history_of(group)
        history.blocks += 1
        try:
            try:
                yield
            except BaseException as error:
                compiled = type(error).__module__.startswith("torch._dynamo")
                reported = compiled_in_block() if compiled else error
                self._leave(group, timeout, reported)
                if compiled:
                    raise reported from error
                raise
            if not history.ended_block:
                if (wrong := self.refused or self._unfinished()) is not None:
                    self._leave(group, timeout, wrong)
                    raise wrong
                transport = GroupTransport(group, timeout)
                agree(transport, {"call": "the end of the block"}, 0, 0, kind=Kind.END)
        finally:
            history.blocks -= 1
            history.ended_block = ""
            self.frame = None

    def _leave(self, group: Group, timeout: float, error: BaseException) -> None:
        with suppress(AttentionError):  # the group may be closed
            send_error(GroupTransport(group, timeout), Kind.LEFT, error)

    def _unfinished(self) -> BadValue | None:
        if not self.called:
            return BadValue(
                "No attention call went through clearhead inside distributed.sharded.",
                "other calls see only this rank's part of the text.",
                f"{THROUGH_CLEARHEAD}; to cut only a tensor, call distributed.shard.",
            )
        if len(self.checkpoints):
            return BadValue(
                "An activation checkpoint (torch.utils.checkpoint) ran inside distributed.sharded, "
                "and the block ends before backward recomputes it.",
                "recomputed attention calls must run inside the block too.",
                "call loss.backward() inside the block, or use no checkpoints.",
            )
        return None

    def enter_call(self, positions: Tensor, any_mask: bool) -> Caller:
        """Find the modules that make an attention call. Raises `BadValue` for a call that the ranks
        cannot compute together."""
        if threading.get_ident() != self.thread:
            raise BadValue(
                f"Attention was called in the thread {threading.current_thread().name!r}, inside a "
                "block of distributed.sharded that another thread entered.",
                "the ranks exchange messages in the order of one thread's calls.",
                "run the model in the thread that entered the block.",
            )
        self.called = True
        caller = find_caller(self.frame)
        must_not_generate(caller)
        check_arguments(caller, positions, any_mask)
        return caller

    def must_be_one_pass(self) -> None:
        must_not_generate(find_caller(self.frame))

    def note_text(self, x: Tensor) -> None:
        """Store a digest of the text that is cut, so that the ranks can compare it."""
        if self.text == UNKNOWN and has_values(x):
            self.text = digest_of_text(x)

    def note_checkpoints(self, caller: Caller, out: Tensor) -> None:
        """Store the checkpoints around a call until backward reaches them."""
        for function in caller.functions:
            known = vars(function).get("clearhead_checkpoint")
            if known is not None:  # the backward pass, which recomputes the call
                self.checkpoints.discard(known)
            else:
                function.clearhead_checkpoint = self._new_checkpoint()  # type: ignore[attr-defined]
        if caller.in_checkpoint and out.requires_grad:
            out.register_hook(partial(self._reached, self._new_checkpoint()))

    def _new_checkpoint(self) -> Checkpoint:
        checkpoint = Checkpoint()
        self.checkpoints.add(checkpoint)
        return checkpoint

    def _reached(self, checkpoint: Checkpoint, gradient: Tensor) -> None:
        self.checkpoints.discard(checkpoint)
