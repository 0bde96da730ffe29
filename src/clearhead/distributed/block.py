"""Record what a rank does inside a `sharded` block; the ranks compare it at the end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from weakref import WeakSet

from torch import Tensor

from ..core.errors import AttentionError, BadValue
from ..core.functional.ambient import THROUGH_CLEARHEAD, compiled_in_block
from ..core.torch_state import has_values
from .caller import Caller, check_arguments, find_caller, must_not_generate
from .handshake import UNKNOWN, Kind, agree, digest_of_text, send_error
from .transport import Group, GroupTransport, history_of


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
