"""Which modules of a model are running, and what they say of the positions of their texts.

Padding is read from 2-D masks alone: the `attention_mask` of a transformers model, the
`key_padding_mask` of torch.nn.MultiheadAttention, and `lengths`. It is never inferred from the
cells of a mask.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BadValue
from ..functional.ambient import UNKNOWN_POSITION, ambient
from ..masks import And, Grid, Mask, lengths
from ..masks.mask import common_align
from ..masks.text_positions import Padding, PerText, Positions, padding_of, per_text
from ..masks.without import WithoutEdges
from ..problem.problem import Problem
from ..torch_state import has_values, in_backward

# The arguments by which modules are given another text, for cross-attention.
OTHER_TEXT = (
    "context",
    "memory",
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
)


class Running(NamedTuple):
    """A module that runs, with its arguments."""

    name: str
    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def arguments(self) -> dict[str, Any]:
        """The arguments by name; None where they are left out."""
        forward = self.module.forward
        names = _parameters(getattr(forward, "__func__", forward))
        names = names[1:] if hasattr(forward, "__func__") else names
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return {**dict.fromkeys(names), **given}

    def has_other_text(self) -> bool:
        """Was it given another text, for cross-attention?"""
        if getattr(self.module, "is_cross_attention", False) is True:
            return True
        tensors = {n: x for n, x in self.arguments().items() if isinstance(x, Tensor)}
        own = next(iter(tensors.values()), None)
        return any(name in tensors and tensors[name] is not own for name in OTHER_TEXT)


@lru_cache(maxsize=1024)
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # a forward not written in Python has no signature
        return ()


class _OwnText(NamedTuple):
    """The last call that was not cross-attention: the modules around it, and its queries."""

    around: list[nn.Module]
    Tq: int
    positions: Positions


class TextStack:
    """The modules that run, outermost first, and where their attention calls stand in texts."""

    def __init__(self) -> None:
        self.running: list[Running] = []
        self._own_text: _OwnText | None = None
        self._known: dict[tuple[str, Grid], set[Positions]] = {}  # of the calls of each module

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if not torch.compiler.is_compiling():  # a graph cannot hold modules
            self.running.append(Running(name, module, args, kwargs))

    def leave(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self.running:
            self.running.pop()

    def clear(self) -> None:
        if not torch.compiler.is_compiling():
            self.running.clear()
            self._own_text = None

    @property
    def crosses(self) -> bool:
        """Is a call of the running module cross-attention?"""
        if not self.running:
            return False
        inner = self.running[-1]
        if not isinstance(inner.module, nn.MultiheadAttention):
            return inner.has_other_text()
        given = inner.arguments()
        query, key = given["query"], given["key"]
        return query is not key and (query.shape != key.shape or self.in_decoder)

    @property
    def in_decoder(self) -> bool:
        """Was one of the running modules given another text?"""
        return any(at.has_other_text() for at in self.running)

    def positions(self, problem: Problem) -> Positions:
        """Where a call that is being answered stands in its texts. Raises `BadValue` in a backward
        pass that may be of several calls which stand elsewhere."""
        name = self.running[-1].name if self.running else ""
        known = self._known.setdefault((name, problem.grid), set())
        if not in_backward():
            found = self._positions(problem)
            if self.crosses or (
                ambient().position is UNKNOWN_POSITION and self._transformer is not None
            ):
                known.add(found)  # which modules around it say
            return found
        # A checkpoint runs a part of the model again, and not the modules around it.
        if len(known) > 1:
            raise BadValue(
                f"{name or 'The model'} was run on texts that are padded differently, and a "
                "checkpoint runs one of these calls again.",
                "in the backward pass a checkpoint does not say which call it repeats, so where "
                "its texts begin is not known.",
                "open a with block for each run, and call backward() in it.",
            )
        return next(iter(known)) if known else self._positions(problem)

    def _positions(self, problem: Problem) -> Positions:
        position, grid = ambient().position, problem.grid
        column = _column_of(problem) if position.start is None else position.start
        stated = column is not None or problem.Tq == problem.Tk
        if column is None and (problem.Tq == problem.Tk or problem.Tq > 1):
            column = 0
        crosses = self.crosses
        padding = position.padding
        if position is UNKNOWN_POSITION:
            padding = self._module_padding(crosses, problem)
        keys, queries = _lengths_of(problem.mask, grid)
        if padding is None and keys is not None:
            padding = Padding((0,) * len(keys), keys)
        if padding is not None and len(padding.first) not in (1, problem.B):
            padding = None
        key: PerText = position.first_key
        if padding is not None:
            key = per_text(lambda first: position.first_key - first, padding.first)
        if crosses and (own := self._positions_of_queries(problem.Tq)) is not None:
            return own._replace(first_key=key, dropped=position.first_key)
        # More keys than queries, and no word on where these stand, may be those of another text.
        one_text = not crosses and (stated or position is not UNKNOWN_POSITION)
        start, length = column, None
        if padding is not None and column is not None and one_text:
            start = per_text(operator.sub, column, padding.first)
            length = per_text(operator.sub, padding.after, padding.first)
        if queries is not None:
            length = per_text(operator.add, queries, start or 0)
        found = Positions(start, key, length, column, position.first_key, stated)
        if not crosses:
            self._own_text = _OwnText([at.module for at in self.running[:-1]], problem.Tq, found)
        return found

    def _positions_of_queries(self, Tq: int) -> Positions | None:
        """In cross-attention: where the last call of the decoder's own text stood."""
        own = self._own_text
        if own is None or own.Tq != Tq:
            return None
        shared = [at for at in self.running[:-1] if any(at.module is m for m in own.around)]
        return own.positions if any(at.has_other_text() for at in shared) else None

    def _module_padding(self, crosses: bool, problem: Problem) -> Padding | None:
        """The padding of the keys that a running module was given; None if it was given none."""
        if not self.running:
            return None
        inner = self.running[-1]
        if isinstance(inner.module, nn.MultiheadAttention):
            mask = inner.arguments()["key_padding_mask"]
            if mask is None or not has_values(mask):
                return None
            drop = mask if mask.dtype == torch.bool else mask == -torch.inf
            return padding_of(~drop.reshape(-1, drop.shape[-1]))
        name = "encoder_attention_mask" if crosses else "attention_mask"
        mask = None if self._transformer is None else self._transformer.arguments().get(name)
        if not isinstance(mask, Tensor) or mask.shape != (problem.B, problem.Tk):
            return None
        return padding_of(mask)

    @property
    def _transformer(self) -> Running | None:
        """The innermost model of transformers that is running."""
        models = (at for at in reversed(self.running) if hasattr(at.module, "base_model_prefix"))
        return next(models, None)


def _column_of(problem: Problem) -> PerText | None:
    """Where query 0 stands among the keys, as the mask says."""
    column = common_align(problem.mask, problem.grid)
    return per_text(int, tuple(column.tolist())) if isinstance(column, Tensor) else column


def _lengths_of(mask: Mask, grid: Grid) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """How many keys and queries of each text are real, where `lengths` says so."""
    if isinstance(mask, WithoutEdges):
        return _lengths_of(mask.rule, grid)
    parts = mask.parts if isinstance(mask, And) else (mask,)
    found: list[tuple[int, ...] | None] = []
    for name, size in (("keys", grid.Tk), ("queries", grid.Tq)):
        numbers = [getattr(x, name) for x in parts if isinstance(x, lengths)]
        counts = [_counts(n, size) for n in numbers if n is not None]
        least = per_text(lambda *n: min(n), *counts) if counts else size
        least = (least,) if isinstance(least, int) else least
        found.append(None if min(least) >= size else least)
    return found[0], found[1]


def _counts(number: Any, most: int) -> PerText:
    if isinstance(number, Tensor):
        if not has_values(number):
            return most
        number = tuple(number.tolist())
    return per_text(lambda n: min(n, most), number)


def names_lengths(mask: Mask, grid: Grid) -> bool:
    """Would `positions` read a padding from this mask?"""
    return any(x is not None for x in _lengths_of(mask, grid))
