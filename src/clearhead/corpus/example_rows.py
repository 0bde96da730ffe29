"""Compute the weights of the queries of examples again: a survey stores few of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.errors import BadValue
from ..models.inspect.watch import watch
from .corpus import Shard
from .reader import Reader
from .tables import Table

IDENTIFY = ("layer", "head", "text", "context", "query")


def weights_of(
    examples: Table, reader: Reader, context: Callable[[int, int], tuple[Shard, int]]
) -> list[Tensor]:
    """Return the weights of each example, (T,). Every context is read once, alone.

    `context` returns the shard of a context by text and number, and the index of the context in it.
    Raises `BadValue` for rows without the columns of an example.
    """
    if missing := [name for name in IDENTIFY if name not in examples.columns]:
        raise BadValue(
            f"The examples have no column {missing[0]!r}.",
            f"an example is identified by {', '.join(IDENTIFY)}.",
            "pass the result of survey.examples(...).",
        )
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
            reader.run(shard.context(index).unsqueeze(0))
        of_layer = {call.layer: call.statistics["exact_rows"] for call in recording}
        for i in own:
            exact = of_layer[rows[i]["layer"]]
            assert isinstance(exact, Tensor)
            weights[i] = exact[0, rows[i]["head"], queries.index(rows[i]["query"])]
    return weights
