"""Find which call a checkpoint with ``use_reentrant=True`` recomputes.

Such a checkpoint is an autograd function, whose context is on the stack in both passes. So the
calls that it makes in its forward pass are noted with the context, in order, and its backward pass
makes the same calls again.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction

from ..errors import BadValue
from ..torch_state import running_functions
from .edits.edit import EditSite


class ReentrantCheckpoints:
    """The calls that checkpoints made inside a block; None is a call outside the model."""

    def __init__(self) -> None:
        self.open = True  # until the block ends
        self._sites: WeakKeyDictionary[FunctionCtx, list[EditSite | None]] = WeakKeyDictionary()
        self._recomputed: WeakKeyDictionary[FunctionCtx, int] = WeakKeyDictionary()

    def note(self, site: EditSite | None) -> None:
        """Add a call to each checkpoint whose forward pass runs now."""
        for checkpoint, recomputes in running_checkpoints():
            if recomputes:
                return
            if checkpoint not in self._sites:
                self._sites[checkpoint] = []
                checkpoint.register_prehook(partial(_must_be_open, self))
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


def running_checkpoints() -> list[tuple[Any, bool]]:
    """Return the checkpoints on the stack, innermost first, and whether each recomputes."""
    return [
        (function, name == "backward")
        for function, name in running_functions()
        if getattr(type(function), "_forward_cls", None) is CheckpointFunction
    ]


def _must_be_open(checkpoints: ReentrantCheckpoints, gradients: object) -> None:
    if not checkpoints.open:
        raise BadValue(
            "A checkpoint with use_reentrant=True recomputes layers after the with block of "
            "intervene, in which they ran.",
            "a layer is edited when it is recomputed, too.",
            "call backward() inside the block.",
        )
