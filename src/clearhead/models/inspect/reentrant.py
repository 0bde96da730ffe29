"""Find which call a reentrant checkpoint recomputes, and refuse to recompute after the block.

Such a checkpoint is an autograd function, whose context is on the stack in both passes. So the
calls that it makes in its forward pass are noted with the context, in order, and its backward pass
makes the same calls again.
"""

from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from ...core.errors import BadValue
from ...core.torch_state import checkpoint_with, running_functions
from .edits.edit import EditSite


class ReentrantCheckpoints:
    """The calls that checkpoints made inside a block; None is a call outside the model."""

    def __init__(self) -> None:
        self.open = True  # until the block ends
        self._sites: WeakKeyDictionary[FunctionCtx, list[EditSite | None]] = WeakKeyDictionary()
        self._recomputed: WeakKeyDictionary[FunctionCtx, int] = WeakKeyDictionary()
        self._guarded: WeakSet[Any] = WeakSet()

    def note(self, site: EditSite | None) -> None:
        """Add a call to each checkpoint whose forward pass runs now."""
        for checkpoint, recomputes in running_checkpoints():
            if recomputes:
                return
            if checkpoint not in self._sites:
                self._sites[checkpoint] = []
                checkpoint.register_prehook(lambda _: self._must_be_open("True"))
            self._sites[checkpoint].append(site)

    def recomputed(self) -> tuple[bool, EditSite | None]:
        """Return whether a checkpoint recomputes this call, and its site.

        None is a call that was made outside the model or the block.
        """
        for checkpoint, recomputes in running_checkpoints():
            if recomputes:
                sites = self._sites.get(checkpoint, [None])
                count = self._recomputed.get(checkpoint, 0)
                self._recomputed[checkpoint] = count + 1
                return True, sites[count % len(sites)]
        return False, None

    def guard(self) -> None:
        """Let the innermost checkpoint with ``use_reentrant=False`` raise after the block.

        Without the edit it would save other tensors than before, which torch reports as an error of
        its own.
        """
        pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)
        frame = checkpoint_with(pack)
        if frame is None or frame in self._guarded:
            return
        self._guarded.add(frame)
        recompute = frame.recompute_fn

        def guarded(*inputs: Any) -> Any:
            self._must_be_open("False")
            return recompute(*inputs)

        frame.recompute_fn = guarded

    def _must_be_open(self, mode: str) -> None:
        if not self.open:
            gave = f"A checkpoint with use_reentrant={mode} recomputes layers after the with block."
            rule = "a layer is edited when it is recomputed, too."
            raise BadValue(gave, rule, "call backward() inside the block.")


def running_checkpoints() -> list[tuple[Any, bool]]:
    """Return the checkpoints on the stack, innermost first, and whether each recomputes.

    Without those around a checkpoint with ``use_reentrant=False`` that recomputes: in their
    backward pass, the calls are its own.
    """
    inside = takewhile(lambda running: running[0] is not None, running_functions())
    return [
        (function, name == "backward")
        for function, name in inside
        if getattr(type(function), "_forward_cls", None) is CheckpointFunction
    ]
