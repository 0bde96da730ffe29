"""Compute the queries, keys, values and outputs of a head again, at the examples of a survey.

Letters: n examples, T tokens of a context, D head dimension, Dv value size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import AttentionError, BadValue, did_you_mean
from ..core.functional.ambient import FollowedCall
from ..models.inspect.recording import Call
from ..models.inspect.watcher import Watcher
from ..models.weights.attention_weights import rotary_of_layer
from ..models.weights.rotations import Rotary
from .basic import KINDS, kinds_of
from .corpus import Shard
from .examples import hashes
from .pca import Projection, principal_components
from .reader import Reader
from .tables import Table

COLUMNS = (
    "text", "context", "query", "key", "weight", "query_token", "key_token", "token_class",
    "looks_at",
)  # fmt: skip
Context = tuple[int, int]  # a text, and the number of the context
OnContext = Callable[[int, int], None]


class HeadVectors(NamedTuple):
    """The vectors of one head at n examples: of the query, and of the key with its largest weight.

    Attributes:
        layer, head: numbers of the head, from 0.
        key_head: the number of the KV head that it reads.
        examples: a row for each example: its text, context and positions, the weight, both tokens,
            the class of the query's token (`token_classes.CLASSES`), and the kind of the key
            (`basic.KINDS`).
        parts: the vectors by name, (n, D) or (n, Dv): "q" and "k" as attention compares them, so
            with the rotation by their positions; "q_unrotated" and "k_unrotated" without this
            rotation, if the model rotates them; "v" the value; "o" the head's output A v, before
            the output projection.
        why_rotated: why the parts without rotation are missing; None if they are not.
    """

    layer: int
    head: int
    key_head: int
    examples: Table
    parts: dict[str, Tensor]
    why_rotated: str | None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in self.parts.items())
        return f"layer {self.layer}, head {self.head}: {sizes}"

    def without_first(self) -> "HeadVectors":
        """Return the examples whose key is not the first of its context.

        In many heads a large part of the variance of keys is the difference of that key, on which
        they rest, from all others.
        """
        at = [i for i, row in enumerate(self.examples.to_pylist()) if row["key"]]
        rows = tuple(self.examples.rows[i] for i in at)
        parts = {name: x[at] for name, x in self.parts.items()}
        return self._replace(examples=Table(COLUMNS, rows), parts=parts)

    def pca(self, of: str = "q", components: int = 3) -> Projection:
        """Return the vectors of one part on their first principal components.

        See `pca.principal_components`. Raises `BadValue` for an unknown part.
        """
        if of not in self.parts:
            names = ", ".join(self.parts)
            raise BadValue(
                f"of is {of!r}.",
                f"this head has {names}." + (f" {self.why_rotated}" if self.why_rotated else ""),
                did_you_mean(of, list(self.parts)) or "use one of these.",
            )
        return principal_components(self.parts[of], components)


def chosen_examples(examples: Table, seed: int, n: int) -> dict[Context, list[dict[str, Any]]]:
    """Choose at least n different queries, or all, from rows of the table `examples`.

    They are those of whole contexts, in the order of the contexts' hashes: a context is read once
    for all its examples.
    """
    of_context: dict[Context, dict[int, dict[str, Any]]] = {}
    for row in examples.to_pylist():
        of_context.setdefault((row["text"], row["context"]), {})[row["query"]] = row
    texts, contexts = np.array([*of_context], dtype=np.int64).T
    chosen: dict[Context, list[dict[str, Any]]] = {}
    order = hashes(seed, texts, contexts, np.zeros_like(texts)).tolist()
    for _, text_context in sorted(zip(order, of_context, strict=True)):
        if sum(map(len, chosen.values())) >= n:
            break
        chosen[text_context] = [row for _, row in sorted(of_context[text_context].items())]
    return chosen


def read_vectors(
    reader: Reader,
    layer: int,
    head: int,
    rows: dict[Context, list[dict[str, Any]]],
    context: Callable[[int, int], tuple[Shard, int]],
    on_context: OnContext = lambda done, total: None,
) -> HeadVectors:
    """Run the model on the contexts of `chosen_examples`, up to the layer.

    Returns the vectors of the head.

    ``on_context(done, total)`` is called before each context, and at the end.
    """
    rotary, why_rotated = _rotary(reader, layer)
    parts: dict[str, list[Tensor]] = {}
    examples: list[tuple[Any, ...]] = []
    key_head = 0
    for done, (text_context, own) in enumerate(rows.items()):
        on_context(done, len(rows))
        shard, index = context(*text_context)
        batch = shard.batch([index])
        call, heads = _call_of(reader, layer, head, batch.ids)
        assert call.query is not None and call.key is not None
        assert call.value is not None and call.output is not None
        key_head = head // (heads // call.key.shape[1])
        queries = torch.tensor([row["query"] for row in own])
        keys = torch.tensor([row["keys"][0] for row in own])
        q, k = call.query[0, 0, queries].cpu(), call.key[0, key_head, keys].cpu()
        of_part = {"q": q, "k": k}
        if rotary is not None:
            back = Rotary(-rotary.frequencies, rotary.interleaved)
            of_part["q_unrotated"] = back.rotated(q.double(), queries).to(q.dtype)
            of_part["k_unrotated"] = back.rotated(k.double(), keys).to(k.dtype)
        of_part |= {"v": call.value[0, key_head, keys], "o": call.output[0, 0, queries]}
        for name, x in of_part.items():
            parts.setdefault(name, []).append(x.cpu())
        best = torch.full((1, 1, batch.ids.shape[1], 1), -1)
        best[0, 0, queries, 0] = keys
        looks_at = kinds_of(batch, best)[0, 0, queries].tolist()
        ids = batch.ids[0].tolist()
        for row, kind in zip(own, looks_at, strict=True):
            key = row["keys"][0]
            of_query = row["query"], key, row["weights"][0], row["token"], shard.spelling[ids[key]]
            examples.append((*text_context, *of_query, row["token_class"], [*KINDS][kind]))
    on_context(len(rows), len(rows))
    joined = {name: torch.cat(vectors) for name, vectors in parts.items()}
    table = Table(COLUMNS, tuple(examples))
    return HeadVectors(layer, head, key_head, table, joined, why_rotated)


def _rotary(reader: Reader, layer: int) -> tuple[Rotary | None, str | None]:
    """Return the rotation of a layer, or why it is unknown."""
    try:
        return rotary_of_layer(reader.module, layer), None
    except AttentionError as error:
        return None, f"The rotation by positions is unknown. {error.gave}"


class _Reached(BaseException):
    """Ends a run of the model behind the layer that is needed."""


def _call_of(reader: Reader, layer: int, head: int, ids: Tensor) -> tuple[Call, int]:
    """Run the model on a context, (1, T), up to a layer. Returns its call, and its query heads."""
    received: list[tuple[Call, int]] = []

    def receive(call: Call, followed: FollowedCall) -> None:
        received.append((call, followed.problem.H))
        raise _Reached

    watcher = Watcher(
        reader.module, receive, layers=[layer], heads=[head], outputs=True, inputs=True
    )
    try:
        with watcher.hooked():
            reader.run(ids)
    except _Reached:
        pass
    return received[0]
