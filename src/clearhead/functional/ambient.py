"""What an attention call depends on besides its arguments, as one value that it reads once.

`watch`, reports and checkpoints listen; `intervene` edits; `distributed.sharded` sets the ranks
that compute together; the masks of transformers say where in its text a call stands.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

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

# Called after each call: the problem whose weights are those of the call, its inputs, its output.
OnCall: TypeAlias = Callable[[Problem, Inputs, Tensor], None]


@dataclass(frozen=True, eq=False)
class EditedCall:
    """What an editor makes of one call: the problem and inputs to compute instead, and what follows
    once an engine has computed them. Here nothing follows."""

    problem: Problem
    inputs: Inputs

    def visible(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """The problem whose weights are those of the edited call, from the one that is computed,
        which all editors have edited."""
        return problem, inputs

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        """The output to return instead of what the engine computed."""
        return out


class Editor(Protocol):
    """Changes attention calls. What it knows of a call is in the `EditedCall`."""

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """The call as it is edited."""

    def edit_again(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """The same for `matrix`, which computes weights of the last call and is not a call."""


class Ranks(Protocol):
    """What computes attention calls in `distributed.sharded`, where q, k and v are shards.

    Listeners are then called with the problem of the whole sequence, and the inputs of this rank.
    `sharding` has functions for code that calls attention, inside of the block or not."""

    @property
    def tokens_before(self) -> int | None:
        """How many tokens came before those that are decoded; None while the sequence is cut."""

    def positions_from(self, start: int, count: int) -> Tensor:
        """Where the `count` tokens of a layer's call stand in the sequence, (count,). While the
        sequence is cut: at this rank's positions, `start` further on, and as many as it holds,
        whatever `count` says. While decoding: after the tokens that came before, whatever `start`
        says, which counts those of this rank's cache."""

    def cached_part(self, x: Tensor) -> Tensor:
        """Of keys or values of new tokens, (..., t, D), those that a cache on this rank keeps."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: "Ambient"
    ) -> Tensor:
        """The output of these queries over the keys of all ranks."""

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
    ) -> dict[str, Result]:
        """Statistics of a problem of the whole sequence, on every rank."""

    def masses(
        self, problem: Problem, inputs: Inputs, queries: Tensor, cells: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """As `sharding.masses_of`, on every rank."""

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """The tensor of the whole sequence, on every rank, from those of the ranks."""

    def must_be_one_text(self, ids: Tensor) -> None:
        """Raise `BadValue` if the document `ids` (B, t) name more than one text. Positions that
        jump because of the layout name none."""

    def refuse(self, error: BadValue) -> BadValue:
        """The error, which the end of the block repeats on every rank if nobody raises it."""


class CallPosition(NamedTuple):
    """What a mask says of a call: the columns of its query 0 (None: as the mask says) and of its
    key 0, before which a cache has dropped the others, and the padding of its keys."""

    start: int | None = None
    first_key: int = 0
    padding: Padding | None = None


UNKNOWN_POSITION = CallPosition()


class Ambient(NamedTuple):
    """The ambient state of a call. `editors` and `listeners` are in the order in which they act;
    `traced` says that torch.compile traces the call, which then depends on nothing else here."""

    ranks: Ranks | None = None
    listeners: tuple[OnCall, ...] = ()
    editors: tuple[Editor, ...] = ()
    position: CallPosition = UNKNOWN_POSITION
    traced: bool = False

    @property
    def is_hooked(self) -> bool:
        """Does anything listen to the call, or edit it?"""
        return bool(self.listeners or self.editors)


ALONE = Ambient()  # an eager call that nothing listens to, edits, or computes on many ranks
_TRACED = Ambient(traced=True)
_ambient: ContextVar[Ambient] = ContextVar("ambient", default=ALONE)  # of this thread
_open: list[Ranks] = []  # of the blocks of all threads; torch.compile guards on it


def ambient() -> Ambient:
    """The ambient state of a call that is made now. Raises `BadValue` where a block of
    `distributed.sharded` is open and its ranks would not compute the call."""
    if torch.compiler.is_compiling():
        if _open:
            # Without fullgraph=True the compiler then runs the call eagerly, which comes here.
            raise compiled_in_block()
        return _TRACED
    around = _ambient.get()
    if _open and (around.ranks is None or get_eval_frame_callback() is not None):
        refused = compiled_in_block() if around.ranks is not None else _in_other_thread()
        raise (around.ranks or _open[-1]).refuse(refused)
    return around


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


# Blocks end in any order, so each takes back what it set and leaves the rest.


@contextmanager
def computed_by(ranks: Ranks) -> Iterator[None]:
    """Inside the `with` block, `ranks` compute the attention calls."""
    before = _ambient.get().ranks
    _ambient.set(_ambient.get()._replace(ranks=ranks))
    _open.append(ranks)
    try:
        yield
    finally:
        _open.remove(ranks)
        _ambient.set(_ambient.get()._replace(ranks=before))


@contextmanager
def listening(on_call: OnCall) -> Iterator[None]:
    """Call `on_call(problem, inputs, out)` after every attention call inside the `with` block."""
    around = _ambient.get()
    _ambient.set(around._replace(listeners=(*around.listeners, on_call)))
    try:
        yield
    finally:
        around = _ambient.get()
        others = tuple(other for other in around.listeners if other is not on_call)
        _ambient.set(around._replace(listeners=others))


@contextmanager
def editing(editor: Editor) -> Iterator[None]:
    """Let `editor` change every attention call inside the `with` block, after the other editors."""
    around = _ambient.get()
    _ambient.set(around._replace(editors=(*around.editors, editor)))
    try:
        yield
    finally:
        around = _ambient.get()
        others = tuple(other for other in around.editors if other is not editor)
        _ambient.set(around._replace(editors=others))


@contextmanager
def at_position(position: CallPosition) -> Iterator[None]:
    """Attention calls inside the `with` block stand there."""
    before = _ambient.get().position
    _ambient.set(_ambient.get()._replace(position=position))
    try:
        yield
    finally:
        _ambient.set(_ambient.get()._replace(position=before))


def visible(
    edits: Sequence[EditedCall], problem: Problem, inputs: Inputs
) -> tuple[Problem, Inputs]:
    """The problem whose weights are those of a call, from the one that is computed."""
    for edit in edits:
        problem, inputs = edit.visible(problem, inputs)
    return problem, inputs


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
