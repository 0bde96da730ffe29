"""Record what a rank does inside a `sharded` block; the ranks compare it at the end.

The modules that call attention are those on Python's stack.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..core.errors import AttentionError, BadValue
from ..core.functional.ambient import THROUGH_CLEARHEAD, computed_by
from ..core.torch_state import ends_recomputation, has_values, in_backward
from .checkpoints import open_checkpoints, replace
from .handshake import SENT, UNKNOWN, Kind, agree, digest_of_text, send_error
from .transport import Group, GroupTransport, history_of

GENERATION = "transformers.generation.utils"
RESUMED = "torch_dynamo_resume_in_forward_at_"  # what torch.compile names the code after a break


@dataclass(frozen=True, eq=False)
class Caller:
    """The modules around a call, innermost first."""

    modules: list[FrameType] = field(default_factory=list)  # frames of modules' `forward`
    in_generate: bool = False  # of transformers

    @property
    def layer(self) -> str:
        """The name in the model of the module that calls; "" outside modules."""
        return _name(self.modules[0], self.modules[-1]) if self.modules else ""

    def module_with(self, name: str) -> FrameType | None:
        """Return the frame of the outermost module that has an argument of this name."""
        return next((f for f in reversed(self.modules) if name in f.f_locals), None)


def find_caller(block: FrameType | None) -> Caller:
    """Find the caller on the stack, up to the frame that entered the block, or that of a checkpoint
    that recomputes the call."""
    modules, in_generate = [], False
    frame: FrameType | None = sys._getframe(1)
    again = InBlock.recompute.__code__
    while frame is not None and frame is not block and frame.f_code is not again:
        code = frame.f_code
        in_generate |= frame.f_globals.get("__name__") == GENERATION
        is_forward = code.co_name == "forward" or code.co_name.startswith(RESUMED)
        if is_forward and isinstance(frame.f_locals.get("self"), nn.Module):
            modules.append(frame)
        frame = frame.f_back
    return Caller(modules, in_generate)


_names: "WeakKeyDictionary[nn.Module, dict[int, str]]" = WeakKeyDictionary()


def _name(inner: FrameType, outer: FrameType) -> str:
    module, root = inner.f_locals["self"], outer.f_locals["self"]
    known = _names.get(root)
    if known is None or id(module) not in known:
        known = _names[root] = {id(part): name for name, part in root.named_modules()}
    return known.get(id(module), "") or type(module).__name__


def must_not_generate(caller: Caller, block: "OpenBlock") -> None:
    """Raise `BadValue` inside `generate` of transformers."""
    if caller.in_generate and not block.generates:
        gave = "generate() of transformers ran inside distributed.sharded."
        rule = "it chooses tokens at the end of each rank's part, and counts positions in it."
        hint = "call distributed.generate(model, ids) outside, or use part.decoding(length)."
        raise BadValue(gave, rule, hint)


def check_arguments(caller: Caller, positions: Tensor, any_mask: bool) -> None:
    """Raise `BadValue` for a transformers model that gets labels, or no positions of its tokens.
    With `any_mask` texts may be packed, and their positions may start again."""
    if in_backward():  # a checkpoint recomputes a layer, not the model
        return
    labels = caller.module_with("labels")
    if labels is not None and labels.f_locals.get("labels") is not None:
        others = labels.f_locals.get("kwargs") or {}
        if any(others.get(name) is None for name in ("shift_labels", "num_items_in_batch")):
            gave = "The model got labels= inside distributed.sharded, of this rank's part alone."
            rule = "a rank knows neither the next token after its part, nor the count of labels."
            hint = "pass **part.inputs(ids, labels=labels), with those of the whole text."
            raise BadValue(gave, rule, hint)
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
        gave = "The model got no position_ids inside distributed.sharded."
        rule = "a model counts its tokens from 0, but the part of this rank starts elsewhere."
        hint = "pass **part.inputs(ids), position_ids=part.positions[None], or those of new tokens."
        raise BadValue(gave, rule, hint)


@dataclass(eq=False)
class OpenBlock:
    """The state of one `sharded` block on this rank."""

    frame: FrameType | None = None  # the one that entered the block; None after it
    text: bytes = UNKNOWN  # a digest of the first tensor that was cut
    called: bool = False  # whether a model called attention
    refused: BadValue | None = None  # an error that is not sent before the block ends
    generates: bool = False  # whether `generate` of transformers may run

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
                self.send(group, timeout, Kind.LEFT, error)
                raise
            if not history.ended_block:
                wrong = self.refused or (None if self.called else _no_call())
                if wrong is not None:
                    self.send(group, timeout, Kind.LEFT, wrong)
                    raise wrong
                transport = GroupTransport(group, timeout)
                agree(transport, {"call": "the end of the block"}, 0, 0, kind=Kind.END)
        finally:
            history.blocks -= 1
            history.ended_block = ""
            self.frame = None

    def send(self, group: Group, timeout: float, kind: Kind, error: BaseException) -> None:
        with suppress(AttentionError):  # the group may be closed
            send_error(GroupTransport(group, timeout), kind, error)

    def enter_call(self, positions: Tensor, any_mask: bool) -> Caller:
        """Find the modules that make an attention call. Raises `BadValue` for a call that the ranks
        cannot compute together."""
        self.called = True
        caller = find_caller(self.frame)
        must_not_generate(caller, self)
        check_arguments(caller, positions, any_mask)
        return caller

    def note_text(self, x: Tensor) -> None:
        """Store a digest of the text that is cut, so that the ranks can compare it."""
        if self.text == UNKNOWN and has_values(x):
            self.text = digest_of_text(x)


def _no_call() -> BadValue:
    gave = "No attention call went through clearhead inside distributed.sharded."
    hint = f"{THROUGH_CLEARHEAD}; to cut only a tensor, call distributed.shard."
    return BadValue(gave, "other calls see only this rank's part of the text.", hint)


class InBlock:
    """Ranks that compute the calls of a `sharded` block."""

    block: OpenBlock
    group: Group
    timeout: float

    @contextmanager
    def computing(self: Any) -> Iterator[None]:
        """Let these ranks compute the calls inside the `with` block."""
        with computed_by(self):
            for opened in open_checkpoints():  # around the block, which they recompute too
                replace(opened, lambda run, *args: run(*args))
            yield

    def carry(self) -> None:
        """Let the checkpoints that were opened in the block recompute with these ranks."""
        for opened in open_checkpoints():
            replace(opened, self.recompute)

    def recompute(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run a checkpoint again, in any thread. Raises its error; after the block, sends it to the
        other ranks too."""
        try:
            with self.computing():
                return run(*args)
        except BaseException as error:
            is_known = ends_recomputation(error) or SENT in vars(error)
            if self.block.frame is None and not is_known:
                self.block.send(self.group, self.timeout, Kind.REFUSED, error)
            raise

    def must_be_one_pass(self) -> None:
        must_not_generate(find_caller(self.block.frame), self.block)

    def refuse(self, error: BadValue) -> BadValue:
        self.block.refused = error
        return error
