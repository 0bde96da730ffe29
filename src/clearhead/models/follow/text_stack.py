"""Track the running modules of a model, and find the positions of their attention calls in texts.

Padding is read only from the `attention_mask` of a transformers model, the `key_padding_mask` of
torch.nn.MultiheadAttention, and `lengths`. It is never inferred from the cells of a mask.
"""

import inspect
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import BadValue
from ...core.functional.ambient import UNKNOWN_POSITION, ambient
from ...core.masks import And, Grid, Mask, lengths
from ...core.masks.mask import common_align
from ...core.masks.text_positions import Padding, PerText, Positions, padding_of, per_text
from ...core.masks.without import WithoutEdges
from ...core.problem.problem import Problem
from ...core.torch_state import has_values, in_backward
from ...hf.architectures import OTHER_TEXT
from .coverage import attends


class Running(NamedTuple):
    """A running module with its arguments."""

    name: str
    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    calls: int  # of the model, before this module ran

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name; None for those that were left out."""
        forward = self.module.forward
        names = _parameters(getattr(forward, "__func__", forward))
        names = names[1:] if hasattr(forward, "__func__") else names
        passed = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return {**dict.fromkeys(names), **passed}

    def has_other_text(self) -> bool:
        """Return whether another text was passed to the module, for cross-attention."""
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
    """The running modules, outermost first, and the positions of their attention calls in texts.

    A listener counts the `calls`. `missed` has the modules that ran without one, and so computed
    attention without clearhead. `pictures` finds images whose patches are tokens, if it is set.
    """

    def __init__(self) -> None:
        self.running: list[Running] = []
        self.calls = 0
        self._thread = threading.get_ident()
        self.missed: dict[str, type[nn.Module]] = {}
        self.pictures: Any = None  # a `PictureTracker`, whose file is above this one
        self._own_text: _OwnText | None = None
        self._known: dict[tuple[str, Grid], set[Positions]] = {}  # of the calls of each module

    def is_other_thread(self) -> bool:
        """Return whether another thread runs than that of the block."""
        # False while torch.compile traces, which runs in one thread and does not support threads.
        return not torch.compiler.is_compiling() and threading.get_ident() != self._thread

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        # A graph cannot hold modules, and another thread runs the model for another caller.
        if not (torch.compiler.is_compiling() or self.is_other_thread()):
            self.running.append(Running(name, module, args, kwargs, self.calls))

    def leave(self, module: nn.Module, arguments: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or not self.running or self.is_other_thread():
            return
        ran = self.running.pop()
        if self.pictures is not None:
            self.pictures.leave(ran, self.calls, arguments, result)
        # The result of a module that raised an error is None. A backward pass reports no calls.
        kind = type(ran.module)
        computed = ran.calls == self.calls and result is not None
        if computed and attends(kind) and not in_backward():  # type: ignore[arg-type]  # a class has a hash
            self.missed[ran.name] = kind

    def clear(self) -> None:
        if not torch.compiler.is_compiling():
            self.running.clear()
            self._own_text = None

    @property
    def crosses(self) -> bool:
        """Whether an attention call of the running module is cross-attention."""
        if not self.running:
            return False
        inner = self.running[-1]
        if not isinstance(inner.module, nn.MultiheadAttention):
            return inner.has_other_text()
        arguments = inner.arguments()
        query, key = arguments["query"], arguments["key"]
        return query is not key and (query.shape != key.shape or self.in_decoder)

    @property
    def in_decoder(self) -> bool:
        """Whether another text was passed to one of the running modules."""
        return any(at.has_other_text() for at in self.running)

    def positions(self, problem: Problem) -> Positions:
        """Return the positions of the current call in its texts.

        Raises `BadValue` in a backward pass if several calls with different positions are possible.
        """
        name = self.running[-1].name if self.running else ""
        known = self._known.setdefault((name, problem.grid), set())
        crosses = self.crosses
        if not in_backward():
            positions = self._positions(problem, crosses)
            if crosses or (
                ambient().position is UNKNOWN_POSITION and self._transformer is not None
            ):
                known.add(positions)  # they depend on the arguments of outer modules
            return positions
        # A checkpoint reruns a part of the model, without the modules around it.
        if len(known) > 1:
            gave = f"A checkpoint recomputes {name or 'the model'}, run with different padding."
            rule = "a checkpoint does not reveal which call, so where its texts begin is unknown."
            raise BadValue(gave, rule, "open a with block for each run, and call backward() in it.")
        return next(iter(known)) if known else self._positions(problem, crosses)

    def _positions(self, problem: Problem, crosses: bool) -> Positions:
        position, grid = ambient().position, problem.grid
        column = _column_of(problem) if position.start is None else position.start
        stated = column is not None or problem.Tq == problem.Tk
        if column is None and (problem.Tq == problem.Tk or problem.Tq > 1):
            column = 0
        padding = position.padding
        if position is UNKNOWN_POSITION:
            padding = self._module_padding(crosses, problem)
        keys, queries = _lengths_of(problem.mask, grid)
        if padding is None and keys is not None:
            padding = Padding((0,) * len(keys), keys)
        if padding is not None and len(padding.first) not in (1, problem.B):
            padding = None
        key: PerText = position.first_key
        real_keys = None
        if padding is not None:
            key = per_text(lambda first: position.first_key - first, padding.first)
            real_keys = per_text(operator.sub, padding.after, padding.first)
        if crosses and (own := self._positions_of_queries(problem.Tq)) is not None:
            return own._replace(first_key=key, dropped=position.first_key, keys=real_keys)
        # If there are more keys than queries, and the position of the queries is unknown, the keys
        # may be those of another text.
        one_text = not crosses and (stated or position is not UNKNOWN_POSITION)
        start, length = column, None
        if padding is not None and column is not None and one_text:
            start, length = per_text(operator.sub, column, padding.first), real_keys
        if queries is not None:
            length = per_text(operator.add, queries, start or 0)
        if padding is None and column is not None and one_text:
            # A cache may have room for tokens after the queries.
            after = per_text(lambda column: column + problem.Tq, column)
            real_keys = None if after == position.first_key + problem.Tk else after
        positions = Positions(start, key, length, column, position.first_key, stated, real_keys)
        if not crosses:
            around = [at.module for at in self.running[:-1]]
            self._own_text = _OwnText(around, problem.Tq, positions)
        return positions

    def _positions_of_queries(self, Tq: int) -> Positions | None:
        """Return the positions of the last self-attention call of the decoder, for
        cross-attention."""
        own = self._own_text
        if own is None or own.Tq != Tq:
            return None
        shared = [at for at in self.running[:-1] if any(at.module is m for m in own.around)]
        return own.positions if any(at.has_other_text() for at in shared) else None

    def _module_padding(self, crosses: bool, problem: Problem) -> Padding | None:
        """Return the padding of the keys from a running module's arguments, or None."""
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
        """The innermost running transformers model; None if there is none."""
        models = (at for at in reversed(self.running) if hasattr(at.module, "base_model_prefix"))
        return next(models, None)


def _column_of(problem: Problem) -> PerText | None:
    """Return the column of query 0 among the keys, from the alignment of the mask."""
    column = common_align(problem.mask, problem.grid)
    return per_text(int, tuple(column.tolist())) if isinstance(column, Tensor) else column


def _lengths_of(mask: Mask, grid: Grid) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the numbers of real keys and queries of each text, from `lengths` in the mask.

    Either is None if `lengths` does not shorten it.
    """
    if isinstance(mask, WithoutEdges):
        return _lengths_of(mask.rule, grid)
    parts = mask.parts if isinstance(mask, And) else (mask,)
    real: list[tuple[int, ...] | None] = []
    for name, size in (("keys", grid.Tk), ("queries", grid.Tq)):
        numbers = [getattr(x, name) for x in parts if isinstance(x, lengths)]
        counts = [_counts(n, size) for n in numbers if n is not None]
        least = per_text(lambda *n: min(n), *counts) if counts else size
        least = (least,) if isinstance(least, int) else least
        real.append(None if min(least) >= size else least)
    return real[0], real[1]


def _counts(number: Any, most: int) -> PerText:
    if isinstance(number, Tensor):
        if not has_values(number):
            return most
        number = tuple(number.tolist())
    return per_text(lambda n: min(n, most), number)


def names_lengths(mask: Mask, grid: Grid) -> bool:
    """Return whether `TextStack.positions` would read padding from this mask."""
    return any(x is not None for x in _lengths_of(mask, grid))
