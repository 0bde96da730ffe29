"""The edit of one path: what a head writes is changed only as another head reads it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ...errors import BadType, BadValue, kind_of, whole_number
from ...nn.token_ids import run
from ..copies import fresh
from ..recording import Recording
from .edit import Edit
from .patch import patch


@dataclass(frozen=True, eq=False, repr=False)
class path(Edit):
    """Change what a head writes, only as another head reads it (path patching).

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

    Args:
        sender: any edit of one layer, named by its number: `patch`, `ablate`, `knock_out`, ...
        receiver: the layer and the head that reads, (layer, head); for keys and values, a key head.
        of: what the receiver reads: "query", "key" or "value".
        positions: positions of the receiver's queries or keys; None means all.
        batch: as in `Edit`, for the receiver.

    Raises `BadValue` or `BadType` for a sender of no or several layers, or that is itself a path,
    and for a receiver that is not in a later layer.

    Source: Wang et al. 2022, "Interpretability in the Wild"; Goldowsky-Dill et al. 2023,
    "Localizing Model Behavior with Path Patching".
    """

    needs_runs = True

    sender: Edit
    receiver: tuple[int, int]
    of: str
    layers: Sequence[int | str] | None = field(default=None, init=False)
    heads: Sequence[int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.sender, Edit) or self.sender.needs_runs:
            raise BadType(
                f"path got {kind_of(self.sender)} as its sender.",
                "the sender is an edit of one layer, which is not itself a path.",
                "pass for example clearhead.edits.ablate(layers=[0], heads=[7]).",
            )
        layers = self.sender.layers or ()
        if len(layers) != 1 or isinstance(layers[0], str):
            raise BadValue(
                f"path got the sender {self.sender!r}.",
                "the sender is an edit of one layer, named by its number.",
                "pass for example layers=[0] to the sender.",
            )
        numbers = self.receiver if isinstance(self.receiver, tuple | list) else ()
        pair = [whole_number(x) for x in numbers]
        if len(pair) != 2 or None in pair:
            raise BadType(
                f"path got receiver={self.receiver!r}.",
                "the receiver is a layer and a head, (layer, head).",
                "pass for example (1, 0).",
            )
        if pair[0] is None or pair[0] <= layers[0]:
            raise BadValue(
                f"path got a sender in layer {layers[0]} and a receiver in layer {pair[0]}.",
                "a head reads what heads of earlier layers write.",
                "pass a receiver in a later layer.",
            )
        if self.of not in ("query", "key", "value"):
            raise BadValue(
                f"path got of={self.of!r}.",
                'the receiver reads with its "query", "key" or "value".',
                "pass one of them; a list of three paths changes all.",
            )
        for name, value in {"receiver": tuple(pair), "layers": pair[:1], "heads": pair[1:]}.items():
            object.__setattr__(self, name, value)
        super().__post_init__()

    def arguments(self) -> list[str]:
        return [repr(self.sender), f"{self.receiver}", repr(self.of)]

    def _where(self) -> Iterable[tuple[str, object]]:
        return [(name, x) for name, x in super()._where() if name not in ("layers", "heads")]

    @property
    def between(self) -> list[int]:
        """The layers whose heads keep their unedited output."""
        first = (self.sender.layers or (0,))[0]
        assert isinstance(first, int)
        return list(range(first + 1, self.receiver[0]))

    def for_copy(self, batch: range) -> Edit | None:
        sender = self.sender.for_copy(batch)
        return (
            None
            if sender is None or self.batch is not None
            else replace(self, sender=sender, batch=batch)
        )

    def as_patch(self, model: nn.Module, inputs: Any) -> patch:
        """Return the equivalent `patch` for a run of the model on these inputs.

        It runs the model twice; once if no layer is between sender and receiver. `inputs` are those
        of `effects`. Raises what `intervene` raises, and `BadValue` for inputs that cannot be
        copied.
        """
        (edit,) = without_paths([self], model, inputs)
        assert isinstance(edit, patch)
        return edit


def without_paths(edits: Sequence[Edit], model: nn.Module, inputs: Any) -> list[Edit]:
    """Replace each path in a list of edits by a `patch`, and keep the others.

    All paths share the unedited run. Paths of different texts also share the run of their senders.
    """
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
            changes.append(one.sender)
        layers = sorted({one.receiver[0] for one in group})
        recording = watch(model, stats=[], inputs=True, layers=layers)
        with intervene(model, changes), recording as received:
            run(model, fresh(inputs))
        for one in group:
            calls = [call for call in received if call.layer == one.receiver[0]]
            where = {n: getattr(one, n) for n in ("layers", "heads", "positions", "batch")}
            patches[one] = patch(Recording(calls), one.of, **where)
    return [patches[edit] if isinstance(edit, path) else edit for edit in edits]


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
