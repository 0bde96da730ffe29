"""Hooks of attention calls: listeners are called after each, editors change it, and ranks compute
it together.

`watch`, reports and checkpoints listen; `intervene` edits; `distributed.sharded` sets the ranks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from ..engines import compute_stats
from ..errors import BadValue
from ..masks.text_positions import Padding
from ..problem.check import Options
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistic

# How attention of a model comes to be seen, edited and computed on ranks, for errors.
THROUGH_CLEARHEAD = (
    "run it inside `with clearhead.compat.patched():` if it calls torch's function "
    "(torch.nn.MultiheadAttention does with need_weights=False), load it with "
    'attn_implementation="clearhead", or build it from clearhead.nn'
)

OnCall: TypeAlias = Callable[[Problem, Inputs, Tensor], None]
_listeners: ContextVar[tuple[OnCall, ...]] = ContextVar("listeners", default=())


class Editor(Protocol):
    """Changes attention calls: the problem before an engine computes it, and the output after."""

    def edit_problem(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The problem to compute instead."""

    def edit_again(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The same for `matrix`, which computes weights of the last call and is no call itself."""

    def visible_problem(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The edited problem whose weights are those of the edited call."""

    def edit_output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        """The output to return instead."""


_editors: ContextVar[tuple[Editor, ...]] = ContextVar("editors", default=())


class Ranks(Protocol):
    """What computes attention calls in `distributed.sharded`, where q, k and v are shards.

    Listeners are then given the problem of the whole sequence, and the inputs of this rank."""

    @property
    def tokens_before(self) -> int | None:
        """How many tokens came before those that are decoded; None while the sequence is cut."""

    def positions_from(self, start: int, count: int) -> Tensor:
        """Where the `count` tokens of a layer's call stand in the sequence, (count,). While the
        sequence is cut: at this rank's positions, `start` further on, and as many as it holds,
        whatever `count` says. While decoding: after the tokens that came before, whatever `start`
        says, which counts those of this rank's cache."""

    def kept(self, x: Tensor) -> Tensor:
        """Of keys or values of new tokens, (..., t, D), those that a cache on this rank keeps."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str) -> Tensor:
        """The output of these queries over the keys of all ranks."""

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
    ) -> dict[str, Result]:
        """Statistics of a problem of the whole sequence, on every rank."""

    def masses(
        self, problem: Problem, inputs: Inputs, queries: Tensor, cells: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The weight of the queries at some positions, (n,), on groups of keys that differ from
        query to query: `cells` are (..., n, Tk), and the result (B, H, n). On every rank."""

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """The tensor of the whole sequence, on every rank, from those of the ranks."""

    def must_be_one_text(self, ids: Tensor) -> None:
        """Raise `BadValue` if the document `ids` (B, t) name more than one text. Positions that
        jump because of the layout name none."""

    def refuse(self, error: BadValue) -> BadValue:
        """The error, which the end of the block repeats on every rank if nobody raises it."""


_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)  # of this thread
_open: list[Ranks] = []  # of all threads; torch.compile guards on it


@contextmanager
def computed_by(ranks: Ranks) -> Iterator[None]:
    """Inside the `with` block, `ranks` compute the attention calls."""
    before = _ranks.set(ranks)
    _open.append(ranks)
    try:
        yield
    finally:
        _open.remove(ranks)
        _ranks.reset(before)


def active_ranks() -> Ranks | None:
    """The ranks that compute attention calls together, inside `distributed.sharded`. Raises
    `BadValue` where the block is open and the call would not be computed by them."""
    if torch.compiler.is_compiling():
        if _open:
            # Without fullgraph=True the compiler then runs the call eagerly, which comes here.
            raise compiled_in_block()
        return None
    ranks = _ranks.get()
    if _open and (ranks is None or get_eval_frame_callback() is not None):
        refused = compiled_in_block() if ranks is not None else _in_other_thread()
        raise (ranks or _open[-1]).refuse(refused)
    return ranks


def compiled_in_block() -> BadValue:
    """The error for torch.compile inside `distributed.sharded`."""
    return BadValue(
        "A model compiled by torch.compile ran inside of distributed.sharded.",
        "a compiled graph computes attention of this rank's part alone, and the ranks compute it "
        "together.",
        "run the model uncompiled inside of the block.",
    )


def _in_other_thread() -> BadValue:
    return BadValue(
        f"Attention was called in the thread {threading.current_thread().name!r} while another one "
        "is inside of distributed.sharded.",
        "the ranks compute the calls of the thread that entered the block; another thread would "
        "compute attention of this rank's part alone.",
        "run the model in the thread of the block; autograd computes checkpoints on a GPU again in "
        "a thread of its own, so leave checkpoints out there.",
    )


def statistics_of(
    problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
) -> dict[str, Result]:
    """Statistics of a call that a listener was given, all queries on all keys."""
    if (ranks := active_ranks()) is not None:
        return ranks.statistics(problem, inputs, statistics)
    return compute_stats(problem, inputs, statistics).finish()


def must_not_be_sharded(verb: str) -> None:
    """Raises `BadValue` inside `distributed.sharded`: `verb` needs the whole sequence."""
    if active_ranks() is not None:
        raise BadValue(
            f"{verb} was called inside of distributed.sharded.",
            "there a rank holds a part of the text, and only attention is answered by all of them.",
            f"call {verb} outside of it; distributed.look gives statistics of shards.",
        )


def is_hooked() -> bool:
    """Does anything listen to attention calls, or edit them? Also while torch.compile traces."""
    return torch.compiler.is_compiling() or bool(_listeners.get() or _editors.get())


def is_alone() -> bool:
    """Is this an eager call that nothing listens to, edits, or computes on many ranks?"""
    return not is_hooked() and not _open


@contextmanager
def listening(on_call: OnCall) -> Iterator[None]:
    """Call `on_call(problem, inputs, out)` after every attention call inside the `with` block."""
    _listeners.set((*_listeners.get(), on_call))
    try:
        yield
    finally:  # other listeners may have been added or removed meanwhile
        _listeners.set(tuple(other for other in _listeners.get() if other is not on_call))


def notify(problem: Problem, inputs: Inputs, out: Tensor) -> None:
    """Call the listeners, after an attention call."""
    if listeners := _listeners.get():
        problem, inputs = shown(problem, inputs)
        for on_call in listeners:
            on_call(problem, inputs, out)


def capture_call(
    run: Callable[[], object], number: int
) -> tuple[tuple[Problem, Inputs] | None, int]:
    """The attention call of this number, from 0, among those that `run` makes (None if it makes
    fewer), and how many it makes. Only that one is kept in memory."""
    captured: tuple[Problem, Inputs] | None = None
    count = 0

    def on_call(problem: Problem, inputs: Inputs, out: Tensor) -> None:
        nonlocal captured, count
        if count == number:
            captured = problem, inputs
        count += 1

    with listening(on_call):
        run()
    return captured, count


class Place(NamedTuple):
    """What a mask says of a call: the columns of its query 0 (None: as the mask says) and of its
    key 0, before which a cache has dropped the others, and the padding of its keys."""

    start: int | None = None
    first_key: int = 0
    padding: Padding | None = None


NOWHERE = Place()
_place: ContextVar[Place] = ContextVar("place", default=NOWHERE)


@contextmanager
def placed_at(place: Place) -> Iterator[None]:
    """Attention calls inside the `with` block stand there."""
    before = _place.set(place)
    try:
        yield
    finally:
        _place.reset(before)


def current_place() -> Place:
    """The innermost `placed_at` block's place."""
    return _place.get()


@contextmanager
def editing(editor: Editor) -> Iterator[None]:
    """Let `editor` change every attention call inside the `with` block, after the other editors."""
    _editors.set((*_editors.get(), editor))
    try:
        yield
    finally:
        _editors.set(tuple(other for other in _editors.get() if other is not editor))


def editors() -> tuple[Editor, ...]:
    """The active editors, outermost first; none while torch.compile traces."""
    return () if torch.compiler.is_compiling() else _editors.get()


def shown(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The problem whose weights are those of the edited call, for statistics."""
    for editor in editors():
        problem, inputs = editor.visible_problem(problem, inputs)
    return problem, inputs
