"""Run copies of a batch together: repeat inputs, split outputs, and check that the split is right.

Inputs and outputs are trees of mappings, lists, tuples and objects (caches, dataclasses). Their
leaves are tensors, numbers and other values.
"""

import copy
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import BadValue, kind_of
from ...core.torch_state import without_repeats

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Leaf(NamedTuple):
    """A leaf of a tree, the path to it, and whether a cache of transformers holds it."""

    path: str
    value: Any
    in_cache: bool


def map_leaves(tree: Any, change: Callable[[Leaf], Any]) -> Any:
    """Return the tree with each leaf replaced by ``change(leaf)``. Each object is copied once."""
    return _mapped(tree, change, "", False, {})


def leaves(tree: Any) -> list[Leaf]:
    """Return the leaves of a tree, in order."""
    in_order: list[Leaf] = []
    map_leaves(tree, in_order.append)
    return in_order


def _mapped(
    tree: Any, change: Callable[[Leaf], Any], path: str, in_cache: bool, copied: dict[int, Any]
) -> Any:
    def mapped(part: Any, name: object) -> Any:
        return _mapped(part, change, f"{path}.{name}" if path else str(name), in_cache, copied)

    if _is_leaf(tree):
        return change(Leaf(path, tree, in_cache))
    if id(tree) in copied:
        return copied[id(tree)]
    if type(tree) in (list, tuple):
        return type(tree)([mapped(part, i) for i, part in enumerate(tree)])
    if isinstance(tree, tuple):  # a named tuple, or a return type of torch
        parts = [mapped(part, i) for i, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    copied[id(tree)] = new = _copied(tree, path)
    if isinstance(tree, Mapping):
        for name, part in tree.items():
            new[name] = mapped(part, name)
        return new
    in_cache = in_cache or hasattr(type(tree), "reorder_cache")
    for name, part in list(vars(new).items()):
        object.__setattr__(new, name, mapped(part, name))
    return new


def _is_leaf(x: object) -> bool:
    if isinstance(x, (Tensor, types.ModuleType, enum.Enum, *ATOMS)) or callable(x):
        return True
    return not isinstance(x, Mapping | list | tuple) and not hasattr(x, "__dict__")


def _copied(x: Any, path: str) -> Any:
    try:
        return copy.copy(x)
    except Exception as error:  # a class may raise anything
        gave = f"effects cannot copy the {kind_of(x)} in {path or 'its inputs'}: {error}"
        rule = "every run gets a copy of the inputs, so that they do not change."
        raise BadValue(gave, rule, "pass tensors, or what copy.copy can copy.") from error


# ------------------------------------------------------------------------------------------ inputs


def fresh(inputs: Any) -> Any:
    """Return a copy of the inputs for one run, which may write to it."""
    return map_leaves(inputs, lambda leaf: _own(leaf.value))


def repeated(inputs: Any, B: int, count: int) -> Any:
    """Return a copy in which tensors with B rows repeat them `count` times."""

    def repeat(leaf: Leaf) -> Any:
        x = leaf.value
        if not isinstance(x, Tensor) or not x.dim() or len(x) != B:
            return _own(x)
        return x.detach().repeat(count, *[1] * (x.dim() - 1))

    return map_leaves(inputs, repeat)


def _own(x: Any) -> Any:
    """Copy a tensor without materialising expanded dimensions."""
    if not isinstance(x, Tensor):
        return x
    if x.layout is not torch.strided or x.is_nested or 0 not in x.stride():
        return x.detach().clone()
    return without_repeats(x.detach()).clone().expand(x.shape)


# ----------------------------------------------------------------------------------------- outputs


class Layout:
    """The leaves of the output of one copy of the batch: shapes of tensors, and other values."""

    def __init__(self, output: Any) -> None:
        self.leaves = [
            leaf._replace(value=leaf.value.shape) if isinstance(leaf.value, Tensor) else leaf
            for leaf in leaves(output)
        ]
        self.uncut = next(filter(None, map(_why_uncut, leaves(output))), "")

    def cut(self, output: Any, count: int) -> Iterator[Any] | str:
        """Return the output of each of `count` copies, or why it cannot be split.

        A tensor is split if it has `count` times as many rows as for one copy.
        """
        if self.uncut:
            return self.uncut
        now = leaves(output)
        if len(now) != len(self.leaves):
            return f"the output has {len(now)} parts, that of one copy has {len(self.leaves)}"
        for one, all_copies in zip(self.leaves, now, strict=True):
            if why := _why_unlike(one, all_copies, count):
                return why
        return (self._of_copy(output, i, count) for i in range(count))

    def _of_copy(self, output: Any, i: int, count: int) -> Any:
        def part(leaf: Leaf) -> Any:
            x = leaf.value
            if not isinstance(x, Tensor) or _is_counter(leaf):
                return x
            rows = len(x) // count
            return x[i * rows : (i + 1) * rows]

        return map_leaves(output, part)


def _why_uncut(leaf: Leaf) -> str:
    """Return why this part of the output cannot be split into copies; "" if it can."""
    x, name = leaf.value, leaf.path or "the output"
    if isinstance(x, Tensor):
        if x.is_nested or (not x.dim() and not _is_counter(leaf)):
            return f"{name} is {'nested' if x.is_nested else 'one number for all rows'}"
        return ""
    plain = (str, bytes, type(None), torch.dtype, torch.device)
    if isinstance(x, plain) or callable(x) or (leaf.in_cache and isinstance(x, bool | int)):
        return ""
    return f"{name} is {kind_of(x)}, which has no rows"


def _why_unlike(one: Leaf, all_copies: Leaf, count: int) -> str:
    name, x = all_copies.path or "the output", all_copies.value
    if isinstance(x, Tensor) and isinstance(one.value, torch.Size):
        if _is_counter(all_copies):
            return ""
        wanted = (count * one.value[0], *one.value[1:]) if one.value else None
        if wanted is None or tuple(x.shape) != wanted:
            return f"{name} is {tuple(x.shape)} for {count} copies, {tuple(one.value)} for one"
        return ""
    if isinstance(x, Tensor | torch.Size) or isinstance(one.value, torch.Size):
        return f"{name} is a tensor in one of the runs only"
    return "" if callable(x) or x == one.value else f"{name} differs from that of one copy"


def _is_counter(leaf: Leaf) -> bool:
    """Return whether this is a cache's counter of positions."""
    x = leaf.value
    return leaf.in_cache and not x.dim() and not x.is_floating_point()
