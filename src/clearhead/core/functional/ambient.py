"""Hold what an attention call depends on besides its arguments, as one value that it reads once.

`following` sets who follows the calls of a model, `editing` who changes them, and
`distributed.sharded` the ranks that compute together. The masks of transformers set the position of
a call in its text.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ..engines import choice
from ..errors import BadValue
from ..masks import dense
from ..masks.text_positions import Padding
from ..problem.biases import bias
from ..problem.check import Options
from ..problem.problem import Inputs, Problem
from ..stats import Result, Statistic, Statistics, exact_rows
from .eager import Arguments, Out, eagerly, not_in_graph

# For errors: how to run a model so that clearhead computes its attention.
THROUGH_CLEARHEAD = (
    "run it inside `with clearhead.compat.patched():` if it calls torch's function "
    "(torch.nn.MultiheadAttention does with need_weights=False), load it with "
    'attn_implementation="clearhead", or build it from clearhead.nn'
)


class FollowedCall(NamedTuple):
    """A computed attention call.

    Attributes:
        problem, inputs: those that have the weights of the call, after edits.
        out: its output, after edits.
        received: the inputs of the engine, after edits.
        stats: the statistics that the follower requested, by name; None if they were not computed
            with the output.
    """

    problem: Problem
    inputs: Inputs
    out: Tensor
    received: Inputs
    stats: dict[str, Result] | None = None


class Follower:
    """Follows attention calls. This one does nothing."""

    def begin(self, problem: Problem, inputs: Inputs) -> Statistics:
        """Return the statistics to compute in the sweep of the call's output, before it begins.

        They are not computed with gradients, and not by every engine: then the call has no `stats`.
        """
        return ()

    def receive(self, call: FollowedCall) -> None:
        """Receive the call that began last, when it is computed."""


@dataclass(frozen=True, eq=False)
class EditedCall:
    """One call as an editor changed it: the problem and inputs to compute instead.

    An editor that also changes the output, or that leaves the computed problem without its edit,
    overrides the methods.
    """

    problem: Problem
    inputs: Inputs

    def visible(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """Return the problem that has the weights of the edited call.

        `problem` and `inputs` are those that are computed, after all editors.
        """
        return problem, inputs

    def output(self, out: Tensor, problem: Problem, inputs: Inputs, engine: str) -> Tensor:
        """Return the output that replaces the engine's output."""
        return out


class Editor:
    """Changes attention calls; this one changes none. It keeps the state of one call in the
    `EditedCall`."""

    def edit(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """Edit a new call."""
        return EditedCall(problem, inputs)

    def edit_again(self, problem: Problem, inputs: Inputs) -> EditedCall:
        """Repeat the edits of the last call for `matrix`, which computes its weights."""
        return EditedCall(problem, inputs)


class Ranks(Protocol):
    """Computes attention calls inside `distributed.sharded`, where q, k and v are shards.

    A follower gets the problem of the full sequence and the inputs of this rank. Layers and
    `models` call the functions of `sharding`, which work inside and outside the block.
    """

    @property
    def tokens_before(self) -> int | None:
        """The number of tokens before those that are decoded; None while ranks share a sequence."""

    def positions_from(self, start: int, count: int) -> Tensor:
        """Return the positions in the sequence of the `count` tokens of a layer's call, (count,).

        While ranks share a sequence, these are the positions of this rank plus `start`, and `count`
        is ignored. While decoding, they follow the tokens before, and `start` is ignored, because
        it counts only the tokens in this rank's cache.
        """

    def cached_part(self, x: Tensor) -> Tensor:
        """Return the new keys or values that this rank's cache stores, from all, (..., t, D)."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: "Ambient"
    ) -> Tensor:
        """Compute the output of these queries over the keys of all ranks."""

    def statistics(
        self, problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
    ) -> dict[str, Result]:
        """Compute statistics of a problem of the full sequence, on every rank."""

    def rows(self, problem: Problem, inputs: Inputs, queries: Tensor) -> Tensor:
        """Compute `sharding.rows_of` on every rank."""

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return the tensor of the full sequence, on every rank, from the parts of the ranks."""

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, on every rank."""

    def must_be_one_pass(self) -> None:
        """Raise `BadValue` for a model that runs several times, such as by `generate`."""

    def must_be_one_text(self, ids: Tensor) -> None:
        """Raise `BadValue` if the document `ids` (B, t) name more than one text.

        Positions that jump because of the layout do not begin a text.
        """

    def carry(self) -> None:
        """Let the checkpoints around this call recompute with these ranks."""

    def refuse(self, error: BadValue) -> BadValue:
        """Return the error, and raise it on every rank at the end of the block if it was caught."""


class CallPosition(NamedTuple):
    """The position of a call in its text: the columns of its query 0 and key 0, and its padding.

    `start` None means that the mask aligns the queries. Before `first_key`, a cache has dropped the
    keys.
    """

    start: int | None = None
    first_key: int = 0
    padding: Padding | None = None


UNKNOWN_POSITION = CallPosition()


class Ambient(NamedTuple):
    """The ambient state of a call, with its editors and followers in the order of their calls.

    While torch.compile traces, `traced` is True and all other fields have their defaults; only
    `ranks` is not None inside `distributed.sharded`.
    """

    ranks: Ranks | None = None
    followers: tuple[Follower, ...] = ()
    editors: tuple[Editor, ...] = ()
    position: CallPosition = UNKNOWN_POSITION
    traced: bool = False

    @property
    def is_hooked(self) -> bool:
        """Does anything follow the call, or edit it?"""
        return bool(self.followers or self.editors)


ALONE = Ambient()  # an eager call without followers, editors and ranks
_TRACED = Ambient(traced=True)
_TRACED_IN_BLOCK = Ambient(cast(Ranks, "those of the open block"), traced=True)
_ambient: ContextVar[Ambient] = ContextVar("ambient", default=ALONE)  # of this thread
_open: list[Ranks] = []  # of the blocks of all threads; torch.compile guards on it


def ambient() -> Ambient:
    """Return the ambient state of a call that begins now.

    Raises `BadValue` if a block of `distributed.sharded` is open and its ranks would not compute
    the call.
    """
    if torch.compiler.is_compiling():
        if not _open:
            return _TRACED
        if not torch.compiler.is_dynamo_compiling():  # in an operation that it does not trace into
            from torch._subclasses.fake_tensor import UnsupportedOperatorException

            raise not_in_graph(UnsupportedOperatorException, "attention")
        return _TRACED_IN_BLOCK
    around = _ambient.get()
    if (ranks := around.ranks) is not None or _open:
        if ranks is None or ranks not in _open:
            raise (ranks or _open[-1]).refuse(_in_other_thread())
        ranks.carry()
    return around


def eagerly_over_ranks(function: Callable[Arguments, Out]) -> Callable[Arguments, Out]:
    """Break the graph of torch.compile around a function while a block of `sharded` is open."""
    breaking = eagerly(function)

    @wraps(function)
    def run(*args: Arguments.args, **keywords: Arguments.kwargs) -> Out:
        return (breaking if _open else function)(*args, **keywords)

    return run


@eagerly
def attend_over_ranks(
    q: Tensor, k: Tensor, v: Tensor, options: Options, engine: str, around: Ambient
) -> Tensor:
    """Compute the output of these queries over the keys of all ranks of an open block."""
    around = ambient() if around.traced else around
    assert around.ranks is not None
    return around.ranks.attention(q, k, v, options, engine, around)


def _in_other_thread() -> BadValue:
    thread = threading.current_thread().name
    gave = f"Attention was called in the thread {thread!r}, not in that of distributed.sharded."
    rule = "the ranks compute the calls of the thread that entered the block."
    hint = "run the model there, or in a thread inside contextvars.copy_context() of that thread."
    return BadValue(gave, rule, hint)


# Blocks may end in any order, so each one removes only what it set.


@contextmanager
def _changed(
    begin: Callable[[Ambient], Ambient], end: Callable[[Ambient], Ambient]
) -> Iterator[None]:
    """Change the ambient state at the beginning and the end of the `with` block."""
    _ambient.set(begin(_ambient.get()))
    try:
        yield
    finally:
        _ambient.set(end(_ambient.get()))


@contextmanager
def computed_by(ranks: Ranks) -> Iterator[None]:
    """Let `ranks` compute the attention calls inside the `with` block."""
    before = _ambient.get().ranks
    if before is not None:
        before.carry()
    _open.append(ranks)
    try:
        with _changed(lambda x: x._replace(ranks=ranks), lambda x: x._replace(ranks=before)):
            yield
    finally:
        _open.remove(ranks)


def following(follower: Follower) -> AbstractContextManager[None]:
    """Let `follower` follow every attention call inside the `with` block."""

    def end(x: Ambient) -> Ambient:
        return x._replace(followers=tuple(f for f in x.followers if f is not follower))

    return _changed(lambda x: x._replace(followers=(*x.followers, follower)), end)


class _Listener(Follower):
    """Passes each call on, without statistics."""

    def __init__(self, on_call: Callable[[FollowedCall], None]) -> None:
        self.on_call = on_call

    def receive(self, call: FollowedCall) -> None:
        self.on_call(call)


def listening(on_call: Callable[[FollowedCall], None]) -> AbstractContextManager[None]:
    """Call `on_call` after every attention call inside the `with` block."""
    return following(_Listener(on_call))


def without_followers() -> AbstractContextManager[None]:
    """Let none of the followers set so far follow the attention calls inside the `with` block."""
    before = _ambient.get().followers
    return _changed(lambda x: x._replace(followers=()), lambda x: x._replace(followers=before))


def editing(editor: Editor) -> AbstractContextManager[None]:
    """Let `editor` change every attention call inside the `with` block, after the other editors."""

    def end(x: Ambient) -> Ambient:
        return x._replace(editors=tuple(e for e in x.editors if e is not editor))

    return _changed(lambda x: x._replace(editors=(*x.editors, editor)), end)


def at_position(position: CallPosition) -> AbstractContextManager[None]:
    """Set the position in the text of attention calls inside the `with` block."""
    before = _ambient.get().position
    return _changed(lambda x: x._replace(position=position), lambda x: x._replace(position=before))


def visible(
    edits: Sequence[EditedCall], problem: Problem, inputs: Inputs
) -> tuple[Problem, Inputs]:
    """Return the problem that has the weights of a call, from the one that is computed."""
    for edit in edits:
        problem, inputs = edit.visible(problem, inputs)
    return problem, inputs


def capture_call(
    run: Callable[[], object], number: int
) -> tuple[tuple[Problem, Inputs] | None, int]:
    """Return attention call `number` of `run`, counted from 0, and the number of its calls.

    The call is None if `run` makes fewer. Only this call stays in memory.
    """
    captured: tuple[Problem, Inputs] | None = None
    count = 0

    def on_call(call: FollowedCall) -> None:
        nonlocal captured, count
        if count == number:
            captured = call.problem, call.inputs
        count += 1

    with listening(on_call):
        run()
    return captured, count


def must_not_be_sharded(verb: str) -> None:
    """Raise `BadValue` inside `distributed.sharded`, because `verb` needs the full sequence."""
    if ambient().ranks is not None:
        rule = "each rank has a part of the text there, and only attention combines the parts."
        hint = f"call {verb} outside the block; distributed.look computes statistics of shards."
        raise BadValue(f"{verb} was called inside distributed.sharded.", rule, hint)


@eagerly_over_ranks
def token_positions(start: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the positions in the sequence of a layer's tokens, (count,), after `start` others."""
    if (ranks := ambient().ranks) is None:
        return torch.arange(start, start + count, dtype=dtype, device=device)
    return ranks.positions_from(start, count).to(device, dtype)


@eagerly_over_ranks
def is_part_of_text() -> bool:
    """Are the tokens of this call a part of the text, whose other parts are on other ranks?"""
    ranks = ambient().ranks
    return ranks is not None and ranks.tokens_before is None


@eagerly_over_ranks
def cached_part(x: Tensor) -> Tensor:
    """Return the new keys or values that a cache stores here, from all, (..., t, D)."""
    return x if (ranks := ambient().ranks) is None else ranks.cached_part(x)


def full_output(out: Tensor) -> Tensor:
    """Return a copy of the output of all queries; without a gradient inside `sharded`."""
    return out.clone() if (ranks := ambient().ranks) is None else ranks.unshard(out.detach())


def of_all_tokens(x: Tensor) -> Tensor:
    """Return the numbers of all queries or keys, (B, H, T), from those of the ones here."""
    return x if (ranks := ambient().ranks) is None else ranks.unshard(x, 2)


def over_ranks(x: Tensor) -> Tensor:
    """Sum a tensor over the ranks; outside `sharded` return it."""
    return x if (ranks := ambient().ranks) is None else ranks.total(x)


def statistics_of(
    problem: Problem, inputs: Inputs, statistics: Sequence[str | Statistic]
) -> dict[str, Result]:
    """Compute statistics of a call that a listener received, over all queries and keys."""
    if (ranks := ambient().ranks) is not None:
        return ranks.statistics(problem, inputs, statistics)
    return choice.statistics_of(problem, inputs, statistics)


def rows_of(p: Problem, inputs: Inputs, queries: Tensor) -> Tensor:
    """Compute the exact weights of the queries at positions (n,) on all keys: (B, H, n, Tk)."""
    if (ranks := ambient().ranks) is not None:
        return ranks.rows(p, inputs, queries)
    every, like = slice(0, p.Tk), torch.empty((), dtype=p.wide, device=p.device)
    keep = p.key_ranges.to_bool(queries, every)
    added = None if p.bias is None else bias(p.bias.block(p.grid, queries, every, like))
    part = replace(p, Tq=len(queries), mask=dense(keep=keep), bias=added)
    requested = [exact_rows(range(len(queries)))]
    part_of = inputs._replace(q=inputs.q[:, :, queries])
    results = choice.statistics_of(part, part_of, requested)
    return cast(Tensor, results["exact_rows"])
