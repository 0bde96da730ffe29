"""What a rank did inside of a `sharded` block, which the ranks compare where they leave it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from weakref import WeakSet

from torch import Tensor

from ..errors import AttentionError, BadValue
from ..functional.ambient import THROUGH_CLEARHEAD, compiled_in_block
from ..torch_state import has_values
from .caller import Caller, check_arguments, find_caller
from .handshake import UNKNOWN, Kind, agree, digest_of_text, excuse
from .transport import Group, GroupTransport, history_of


class Checkpoint:
    """An activation checkpoint that made a call. It lives as long as autograd's graph, which holds
    it, and leaves its set once backward has reached it."""


@dataclass(eq=False)
class Block:
    """One block, on this rank."""

    thread: int = field(default_factory=threading.get_ident)
    frame: FrameType | None = None  # that entered it
    text: bytes = UNKNOWN  # a digest of the first tensor that was cut
    called: bool = False  # did a model call attention here?
    refused: BadValue | None = None  # where the other ranks could not be told
    checkpoints: "WeakSet[Checkpoint]" = field(default_factory=WeakSet)

    @contextmanager
    def compared(self, group: Group, timeout: float) -> Iterator[None]:
        """At the end of the `with` block the ranks compare what they did inside. Raises `BadValue`
        on every rank if one left it by an error, or did not compute together with the others."""
        history = history_of(group)
        history.blocks += 1
        try:
            try:
                yield
            except BaseException as error:
                compiled = type(error).__module__.startswith("torch._dynamo")
                shown = compiled_in_block() if compiled else error
                self._leave(group, timeout, shown)
                if compiled:
                    raise shown from error
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
        with suppress(AttentionError):  # a group that was given up
            excuse(GroupTransport(group, timeout), Kind.LEFT, error)

    def _unfinished(self) -> BadValue | None:
        if not self.called:
            return BadValue(
                "No attention call went through clearhead inside of distributed.sharded.",
                "only calls that do are computed by all ranks; any other is of this rank's part "
                "alone.",
                f"{THROUGH_CLEARHEAD}; to cut a tensor alone, call distributed.shard.",
            )
        if len(self.checkpoints):
            return BadValue(
                "An activation checkpoint (torch.utils.checkpoint) ran inside of "
                "distributed.sharded, and the block ends before backward has computed it again.",
                "it runs a part of the model again, whose attention calls the ranks compute "
                "together only inside of the block.",
                "call loss.backward() inside of the block, or leave checkpoints out.",
            )
        return None

    def enter_call(self, positions: Tensor, any_mask: bool) -> Caller:
        """Who makes an attention call. Raises `BadValue` for one that the ranks cannot compute
        together."""
        if threading.get_ident() != self.thread:
            raise BadValue(
                f"Attention was called in the thread {threading.current_thread().name!r}, inside "
                "of a block of distributed.sharded that another thread entered.",
                "messages between the ranks come in the order of one thread's calls.",
                "run the model in the thread of the block.",
            )
        self.called = True
        caller = find_caller(self.frame)
        check_arguments(caller, positions, any_mask)
        return caller

    def note_text(self, x: Tensor) -> None:
        """Remember which text is cut, so that the ranks can compare it."""
        if self.text == UNKNOWN and has_values(x):
            self.text = digest_of_text(x)

    def note_checkpoints(self, caller: Caller, out: Tensor) -> None:
        """Remember the checkpoints around a call until backward reaches them."""
        for function in caller.functions:
            known = vars(function).get("clearhead_checkpoint")
            if known is not None:  # its backward pass, which computes the call again
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
