"""Check that a tensor is a sum of linear functions of some leaves, by the graph of autograd.

The check is a list of the operations that are linear, by the names of autograd's nodes. A product
is linear if one of its factors depends on the leaves. So a function that is not in the list, such
as a gate or an activation, is refused by name.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The operands of a product, of which one may depend on the leaves; of a quotient only the first.
_PRODUCTS = {
    "Mul": (0, 1), "Mm": (0, 1), "Bmm": (0, 1), "Mv": (0, 1), "Dot": (0, 1), "Addmm": (1, 2),
    "Addbmm": (1, 2), "Baddbmm": (1, 2), "Linear": (0, 1), "Div": (1,), "Addcmul": (1, 2),
}  # fmt: skip
_LINEAR = {
    "Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "ToCopy", "Copy", "CopyBackwards",
    "Clone", "Alias", "View", "UnsafeView", "ReshapeAlias", "Reshape", "AsStrided", "T",
    "Transpose", "Permute", "Expand", "Repeat", "Squeeze", "Unsqueeze", "Slice", "Select", "Split",
    "SplitWithSizes", "Unbind", "Unsafe_Split", "UnsafeSplit", "Chunk", "Narrow", "Cat", "Stack",
    "Index", "IndexSelect", "Gather", "Roll", "Flip", "Diagonal", "Unfold", "MaskedFill", "Where",
    "ConstantPadNd", "ViewAsComplex", "ViewAsReal", "Complex", "Real", "Conj", "RepeatInterleave",
    "Contiguous",
}  # fmt: skip


def nonlinear_step(x: Tensor, leaves: Sequence[Tensor]) -> str | None:
    """Return the name of an operation between the leaves and x that is not linear, or None."""
    wanted = {id(leaf) for leaf in leaves}
    reaches: dict[Any, bool] = {}  # whether a node depends on a leaf
    todo = [x.grad_fn]
    while todo:
        node = todo[-1]
        inputs = [] if node is None else [n for n, _ in node.next_functions]
        waiting = [n for n in inputs if n is not None and n not in reaches]
        if waiting:
            todo += waiting
            continue
        todo.pop()
        if node is None or node in reaches:
            continue
        depends = [n is not None and reaches[n] for n in inputs]
        reaches[node] = id(getattr(node, "variable", None)) in wanted or any(depends)
        if any(depends):
            kind = re.sub(r"^.*::|Backward\d*$", "", node.name())
            if kind in _PRODUCTS:
                factors = [depends[i] for i in _PRODUCTS[kind] if i < len(depends)]
                if sum(factors) > (len(factors) > 1):
                    return f"{kind} of two parts of the stream"
            elif kind == "CopySlices" and not _copies(node):
                return "a function in place on a part of a tensor"
            elif kind not in _LINEAR | {"CopySlices"}:
                return kind
    return None


def _copies(node: Any) -> bool:
    """Does `CopySlices`, which writes into a view, only copy a tensor?

    The node does not name what it does. The gradients of a copy are numbers that the node receives,
    or 0 where they were overwritten.
    """
    written = node._input_metadata[0]
    shape = torch.Size(written.shape)
    received = torch.arange(shape.numel(), device=written.device) % 97 + 1
    received = received.reshape(shape).to(written.dtype)
    gradients = node(received)
    if not isinstance(gradients, tuple) or gradients[1] is None:
        return False  # a function of the view alone
    before, copied = gradients
    moved = before is None or bool(((before == received) | (before == 0)).all())
    return moved and bool(torch.isin(copied, received).all())
