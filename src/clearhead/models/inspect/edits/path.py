"""The edit of one path: what a head or MLP writes is changed only as another head reads it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ....core.errors import BadType, BadValue, did_you_mean, kind_of, must_be_among, whole_number
from ....core.problem.problem import Problem
from ....nn.token_ids import as_batch, run
from ...follow.copies import fresh
from ...follow.layers import MissingLayer
from ...follow.refused_models import no_random_numbers
from ..recording import Recording
from .edit import Edit
from .patch import patch

Receiver: TypeAlias = tuple[int, int]  # a layer and a head


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _WithoutModule(Edit):
    """The sender of a path that is a module: its output becomes zeros."""

    module: str

    def for_copy(self, batch: range) -> None:
        return None

    @contextmanager
    def applied(self, model: nn.Module, received: Recording) -> Iterator[None]:
        """Replace the output of the module inside the `with` block.

        Raises `BadValue` if the model has no such module, or if it runs after the receiver, whose
        call is then in `received`, never or several times.
        """
        modules, runs = dict(model.named_modules()), []
        if self.module not in modules:
            near = did_you_mean(self.module, modules)
            raise self._refused(f"the model has no module of this name{near and f'; {near}'}")

        def zero(module: nn.Module, args: object, output: Any) -> Any:
            runs.append(len(received))
            parts = output if isinstance(output, tuple) else (output,)
            zeros = torch.zeros_like(parts[0])
            return (zeros, *parts[1:]) if isinstance(output, tuple) else zeros

        with modules[self.module].register_forward_hook(zero):
            yield
        if runs != [0]:
            raise self._refused(f"it ran {runs.count(0)} times before the receiver")

    def _refused(self, why: str) -> BadValue:
        rule = "a sender that is a module runs once, before the call of the receiver."
        hint = "pass for example 'model.layers.0.mlp', and a receiver in a later layer."
        return BadValue(f"path got the sender {self.module!r}, and {why}.", rule, hint)


@dataclass(frozen=True, eq=False, repr=False)
class path(Edit):
    """Change what a head or an MLP writes, only as another head reads it (path patching).

    >>> sender = ch.edits.patch(other, layers=[0], heads=[7])  # doctest: +SKIP
    >>> ch.edits.path(sender, (1, 0), "query")  # as head 0 of layer 1 reads it  # doctest: +SKIP

    It is the `patch` of the receiver's queries, keys or values by those of a run in which

    - `sender` is applied,
    - every head in the layers between sender and receiver has its unedited output,
    - everything else is recomputed: MLPs, norms, embeddings.

    So the change reaches the receiver directly and through MLPs, and not through other heads. The
    scales of norms change with it, as in Wang et al.; `logit_attribution` freezes them. In the
    edited run, everything after the receiver is recomputed. Edits of the same list apply in all of
    these runs; other paths do not.

    `effects` makes the two more runs that a path needs. For `intervene`, `as_patch` makes them. A
    cache is an input of the runs: the keys and values in it do not change.

    Several senders or receivers are several paths, which `effects` measures one by one:

    >>> every = ch.edits.path(ch.edits.patch(other), None, "query")  # doctest: +SKIP
    >>> ch.effects(..., edits=every, over=("layers", "heads", "receivers"))  # doctest: +SKIP

    Args:
        sender: any edit: `patch`, `ablate`, `knock_out`, ... That of one path has one layer, named
            by its number. Or the name of a module that writes into the stream, such as an MLP: its
            output becomes zeros, and all heads before the receiver keep theirs.
        receiver: the layer and the head that reads, (layer, head); for keys and values, a KV head.
            A list names several; None means all heads in layers after the sender.
        of: what the receiver reads: "query", "key" or "value".
        positions: positions of the receiver's queries or keys; None means all.
        batch: as in `Edit`, for the receiver.

    Raises `BadValue` or `BadType` for a sender that is itself a path, and for a receiver that is
    not in a later layer; when it runs, for several senders or receivers.

    Source: Wang et al. 2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023,
    "Localizing Model Behavior with Path Patching".
    """

    needs_runs = True

    sender: Edit | str
    receiver: Receiver | Sequence[Receiver] | None
    of: str
    layers: Sequence[int | str] | None = field(default=None, init=False)
    heads: Sequence[int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sender, Edit | str) or self.sending.needs_runs:
            rule = "the sender is an edit, which is not itself a path, or the name of a module."
            hint = "pass for example clearhead.edits.ablate(layers=[0], heads=[7])."
            raise BadType(f"path got {kind_of(self.sender)} as its sender.", rule, hint)
        receivers = self.receivers or ()
        sending = [layer for layer in self.sending.layers or () if isinstance(layer, int)]
        for layer, _ in receivers:
            if sending and layer <= min(sending):
                gave = f"path got a sender in layer {min(sending)} and a receiver in layer {layer}."
                rule = "a head reads what heads of earlier layers write."
                raise BadValue(gave, rule, "pass a receiver in a later layer.")
        rule = 'the receiver reads with its "query", "key" or "value".'
        hint = "pass one of them; a list of three paths changes all."
        must_be_among(("query", "key", "value"), "path got of", self.of, rule, hint)
        if len(receivers) == 1:
            ((layer, head),) = receivers
            named = {"receiver": (layer, head), "layers": [layer], "heads": [head]}
            for name, value in named.items():
                object.__setattr__(self, name, value)
        super().__post_init__()

    def arguments(self) -> list[str]:
        return [repr(self.sender), f"{self.receiver}", repr(self.of)]

    @property
    def sending(self) -> Edit:
        """The sender as an edit; that of a module has no layers."""
        return _WithoutModule(module=self.sender) if isinstance(self.sender, str) else self.sender

    @property
    def receivers(self) -> tuple[Receiver, ...] | None:
        """The receivers that are named; None for all."""
        return None if self.receiver is None else _pairs(self.receiver)

    def ends(self) -> tuple[int, Receiver]:
        """Return the sender's layer, and the receiver. Raises `BadValue` for several of either.

        The layer of a module is -1, so all heads before the receiver keep their output.
        """
        if isinstance(self.sending, _WithoutModule):
            return -1, self.one_receiver()
        layers = self.sending.layers or ()
        if len(layers) != 1 or isinstance(layers[0], str):
            rule = "the sender of one path is an edit of one layer, named by its number."
            hint = "pass for example layers=[0] to the sender; effects moves one over layers."
            raise BadValue(f"path got the sender {self.sender!r}.", rule, hint)
        return layers[0], self.one_receiver()

    def one_receiver(self) -> Receiver:
        """Return the receiver. Raises `BadValue` if there are several."""
        if self.receivers is None or len(self.receivers) != 1:
            rule = "one path has one receiver."
            hint = 'pass for example (1, 0), or to effects over=("layers", "heads", "receivers").'
            raise BadValue(f"path got receiver={self.receiver!r}.", rule, hint)
        return self.receivers[0]

    def head_count(self, problem: Problem) -> int:
        return super().head_count(problem) if self.of == "query" else problem.G

    def _where(self) -> Iterable[tuple[str, object]]:
        return [(name, x) for name, x in super()._where() if name not in ("layers", "heads")]

    @property
    def between(self) -> list[int]:
        """The layers whose heads keep their unedited output."""
        first, (last, _) = self.ends()
        return list(range(first + 1, last))

    def for_copy(self, batch: range) -> Edit | None:
        sender = self.sending.for_copy(batch)
        if sender is None or self.batch is not None:
            return None
        return replace(self, sender=sender, batch=batch)

    def as_patch(self, model: nn.Module, inputs: Any) -> patch:
        """Return the equivalent `patch` for a run of the model on these inputs.

        It runs the model twice; once if no layer is between sender and receiver. `inputs` are those
        of `effects`, or the ids of one text, (T,). Raises what `intervene` raises, and `BadValue`
        for inputs that cannot be copied, or a model that draws random numbers.
        """
        with no_random_numbers(model):
            (edit,) = without_paths([self], model, as_batch(inputs))
        assert isinstance(edit, patch)
        return edit


def without_paths(edits: Sequence[Edit], model: nn.Module, inputs: Any) -> list[Edit]:
    """Replace each path in a list of edits by a `patch`, and keep the others.

    All paths share the unedited run. Paths of different texts also share the run of their senders.
    Raises `BadValue` for a receiver in a layer that the model does not have.
    """
    try:
        return _without_paths(edits, model, inputs)
    except MissingLayer as error:
        receivers = [edit.one_receiver() for edit in edits if isinstance(edit, path)]
        hint = "pass a receiver in one of these layers."
        raise BadValue(f"path got receiver={max(receivers)}.", error.rule, hint) from None


def _without_paths(edits: Sequence[Edit], model: nn.Module, inputs: Any) -> list[Edit]:
    from ..intervene import intervene  # which imports the edits
    from ..watch import watch

    paths = [edit for edit in edits if isinstance(edit, path)]
    others = [edit for edit in edits if not isinstance(edit, path)]
    unedited = Recording()
    if between := sorted({layer for one in paths for layer in one.between}):
        recording = watch(model, stats=[], outputs=True, layers=between)
        with intervene(model, others), recording as unedited:
            run(model, fresh(inputs))
    patches: dict[path, patch] = {}
    for group in _of_different_texts(paths):
        changes: list[Edit] = [*others]
        for one in group:
            if one.between:
                changes.append(patch(unedited, layers=one.between, batch=one.batch))
            if not isinstance(one.sending, _WithoutModule):
                changes.append(one.sending)
        layers = sorted({one.ends()[1][0] for one in group})
        recording = watch(model, stats=[], inputs=True, layers=layers)
        with ExitStack() as stack:
            stack.enter_context(intervene(model, changes))
            received = stack.enter_context(recording)
            for one in group:
                if isinstance(one.sending, _WithoutModule):
                    stack.enter_context(one.sending.applied(model, received))
            run(model, fresh(inputs))
        for one in group:
            calls = [call for call in received if call.layer == one.ends()[1][0]]
            where = {n: getattr(one, n) for n in ("layers", "heads", "positions", "batch")}
            patches[one] = patch(Recording(calls), one.of, **where)
    return [patches[edit] if isinstance(edit, path) else edit for edit in edits]


def _pairs(receiver: Any) -> tuple[Receiver, ...]:
    """Return the receivers of a path. Raises `BadType` for anything but pairs of whole numbers."""
    listed = receiver if isinstance(receiver, list | tuple) else ()
    if not listed or not all(isinstance(pair, list | tuple) for pair in listed):
        listed = [listed]
    pairs = [[whole_number(x) for x in pair] for pair in listed]
    if any(len(pair) != 2 or None in pair for pair in pairs):
        rule = "the receiver is a layer and a head, (layer, head), or a list of them."
        hint = "pass for example (1, 0); None means all heads in later layers."
        raise BadType(f"path got receiver={receiver!r}.", rule, hint)
    return tuple((layer, head) for layer, head in pairs if layer is not None and head is not None)


def _of_different_texts(paths: Sequence[path]) -> list[list[path]]:
    """Group paths so that those of a group are limited to different rows of the batch."""
    groups: list[list[path]] = []
    for one in paths:
        rows = {*one.batch} if one.batch is not None and min(one.batch, default=0) >= 0 else None
        for group in groups:
            taken = [other.batch for other in group]
            if rows is not None and all(x is not None and rows.isdisjoint(x) for x in taken):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups
