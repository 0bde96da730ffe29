"""Compute again, at the examples of a survey, what it does not store: weights and vectors of heads.

Letters: n examples, T tokens of a context, D head dimension, Dv value size.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import AttentionError, BadValue, as_count, did_you_mean
from ..core.formatting import quantity
from ..core.functional.ambient import FollowedCall
from ..models.inspect.recording import Call
from ..models.inspect.watch import watch
from ..models.inspect.watcher import Watcher
from ..models.weights.attention_weights import rotary_of_layer
from ..models.weights.norms_and_rotations import Rotary
from .basic import KINDS, kinds_of
from .corpus import Shard
from .examples import hashes
from .metric import Batch
from .reader import Reader
from .tables import Table

ROUNDING = 4  # units in the last place by which a model may round a vector


class Projection(NamedTuple):
    """Vectors x, (n, D), on their first c principal components, in float64.

    points = (x - mean) @ components.T

    Attributes:
        points: the coordinates of each vector, (n, c).
        shares: the fraction of the variance along each component, (c,); in falling order.
        components: directions of length 1, (c, D). The entry with the largest magnitude of each is
            positive, the first one of equals.
        mean: the mean of the vectors, (D,).
    """

    points: Tensor
    shares: Tensor
    components: Tensor
    mean: Tensor


def principal_components(x: Tensor, count: int = 3) -> Projection:
    """Return vectors, (n, D), on their first `count` principal components.

    It is a singular value decomposition in float64 of the vectors without their mean. Components
    are left out whose singular value is at most `ROUNDING` eps |x|, with the eps of the vectors'
    dtype and the Frobenius norm, so fewer than `count` may be returned; none if all vectors are
    equal within rounding, or if there are none.

    Raises `BadType` or `BadValue` unless `count` is a whole number of 1 or more, and `BadValue` for
    NaN and infinity.
    """
    rule, hint = "it is a number of components, 1 or more.", "pass for example components=3."
    count = as_count("components", count, rule, hint, least=1)
    if not bool(x.isfinite().all()):
        count = int((~x.isfinite()).any(-1).sum())
        gave = f"NaN or infinity in {count} of {quantity(len(x), 'vector')}."
        rule = "principal components are of finite vectors."
        raise BadValue(gave, rule, "check the weights of the model.")
    if not len(x):
        x = x.new_zeros(1, x.shape[1])[:0].double()
        return Projection(x[:, :0], x.sum(0)[:0], x[:0], x.sum(0))
    eps = torch.finfo(x.dtype).eps
    x = x.double()
    mean = x.mean(0)
    centred = x - mean
    _, s, rows = torch.linalg.svd(centred, full_matrices=False)
    rounding = ROUNDING * eps * torch.linalg.matrix_norm(x)
    components = rows[: min(count, int((s > rounding).sum()))]
    largest = components.abs().argmax(-1, keepdim=True)
    components = components * components.gather(-1, largest).sign()
    shares = (s.square() / s.square().sum())[: len(components)]
    return Projection(centred @ components.T, shares, components, mean)


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
            the class of the query's token (`looks.CLASSES`), and the kind of the key
            (`basic.KINDS`); None for a picture.
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

        See `principal_components`. Raises `BadValue` for an unknown part.
        """
        if of not in self.parts:
            names = ", ".join(self.parts)
            rule = f"this head has {names}." + (f" {self.why_rotated}" if self.why_rotated else "")
            hint = did_you_mean(of, list(self.parts)) or "use one of these."
            raise BadValue(f"of is {of!r}.", rule, hint)
        return principal_components(self.parts[of], components)


def chosen_examples(examples: Table, seed: int, n: int) -> dict[Context, list[dict[str, Any]]]:
    """Choose at least n different queries, or all, from rows of the table `examples`.

    They are those of whole contexts, in the order of the contexts' hashes: a context is read once
    for all its examples.
    """
    of_context: dict[Context, dict[int, dict[str, Any]]] = {}
    for row in examples.to_pylist():
        of_context.setdefault((row["text"], row["context"]), {})[row["query"]] = row
    chosen: dict[Context, list[dict[str, Any]]] = {}
    for text_context in in_order_of_hashes(seed, of_context):
        if sum(map(len, chosen.values())) >= n:
            break
        chosen[text_context] = [row for _, row in sorted(of_context[text_context].items())]
    return chosen


def in_order_of_hashes(seed: int, contexts: Iterable[Context]) -> list[Context]:
    """Return contexts in the order of their hashes: the first ones are a uniform sample."""
    every = list(contexts)
    texts, numbers = np.array(every, dtype=np.int64).T
    order = hashes(seed, texts, numbers, np.zeros_like(texts)).argsort(kind="stable")
    return [every[i] for i in order.tolist()]


def read_vectors(
    reader: Reader, layer: int, head: int, rows: dict[Context, list[dict[str, Any]]],
    context: Callable[[int, int], tuple[Shard, int]], on_context: OnContext = lambda done,
    total: None,
) -> HeadVectors:  # fmt: skip
    """Run the model on the contexts of `chosen_examples`, up to the layer.

    Returns the vectors of the head.

    ``on_context(done, total)`` is called before each context, and at the end.
    """
    rotary = why_rotated = None
    try:
        rotary = rotary_of_layer(reader.module, layer)
    except AttentionError as error:
        why_rotated = f"The rotation by positions is unknown. {error.gave}"
    parts: dict[str, list[Tensor]] = {}
    examples: list[tuple[Any, ...]] = []
    key_head = 0
    for done, (text_context, own) in enumerate(rows.items()):
        on_context(done, len(rows))
        shard, index = context(*text_context)
        batch = shard.batch([index])
        call, heads = _call_of(reader, layer, head, batch)
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
            on_kind = [*KINDS][kind] if batch.pixels is None else None
            examples.append((*text_context, *of_query, row["token_class"], on_kind))
    on_context(len(rows), len(rows))
    joined = {name: torch.cat(vectors) for name, vectors in parts.items()}
    table = Table(COLUMNS, tuple(examples))
    return HeadVectors(layer, head, key_head, table, joined, why_rotated)


class _Reached(BaseException):
    """Ends a run of the model behind the layer that is needed."""


def _call_of(reader: Reader, layer: int, head: int, batch: Batch) -> tuple[Call, int]:
    """Run the model on a context up to a layer. Returns its call, and its query heads."""
    received: list[tuple[Call, int]] = []

    def receive(call: Call, followed: FollowedCall) -> None:
        received.append((call, followed.problem.H))
        raise _Reached

    watcher = Watcher(
        reader.module, receive, layers=[layer], heads=[head], outputs=True, inputs=True
    )
    try:
        with watcher.hooked():
            reader.run(batch.ids, batch.pixels)
    except _Reached:
        pass
    return received[0]


IDENTIFY = ("layer", "head", "text", "context", "query")


def weights_of(
    examples: Table, reader: Reader, context: Callable[[int, int], tuple[Shard, int]]
) -> list[Tensor]:
    """Return the weights of each example, (T,). Every context is read once, alone.

    `context` returns the shard of a context by text and number, and the index of the context in it.
    Raises `BadValue` for rows without the columns of an example.
    """
    if missing := [name for name in IDENTIFY if name not in examples.columns]:
        rule = f"an example is identified by {', '.join(IDENTIFY)}."
        hint = "pass the result of survey.examples(...)."
        raise BadValue(f"The examples have no column {missing[0]!r}.", rule, hint)
    rows = examples.to_pylist()
    of_context: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        of_context.setdefault((row["text"], row["context"]), []).append(i)
    weights = [torch.empty(0)] * len(rows)
    for text_context, own in of_context.items():
        shard, index = context(*text_context)
        queries = sorted({rows[i]["query"] for i in own})
        layers = sorted({rows[i]["layer"] for i in own})
        with watch(reader.module, stats=[], layers=layers, exact_rows=queries) as recording:
            batch = shard.batch([index])
            reader.run(batch.ids, batch.pixels)
        of_layer = {call.layer: call.statistics["exact_rows"] for call in recording}
        for i in own:
            exact = of_layer[rows[i]["layer"]]
            assert isinstance(exact, Tensor)
            weights[i] = exact[0, rows[i]["head"], queries.index(rows[i]["query"])]
    return weights
