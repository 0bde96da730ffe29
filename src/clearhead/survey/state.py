"""The state of a shard: sums, counts, examples and links, which merge exactly with other states."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..files import atomic_io
from .examples import EXAMPLE
from .token_counts import LINK

FOLDER = "states"


@dataclass(eq=False)
class LayerState:
    """The sums of one layer, of H heads and M metrics over n texts.

    Attributes:
        module: the name of the module that calls attention.
        sums: the sum of each metric over the queries of each text, (n, H, M) in float64.
        queries: the number of these queries, (n, M) in int64.
        uniform: the sum of each metric for uniform weights, (M,) in float64; NaN without one.
        counts: the histograms of all metrics, one after the other, (H, bins) in int64.
    """

    module: str
    sums: Tensor
    queries: Tensor
    uniform: Tensor
    counts: Tensor


@dataclass(eq=False)
class State:
    """What a shard, or several merged ones, leave of the corpus.

    Attributes:
        texts: the numbers of the texts, (n,), in rising order.
        layers: the sums of each layer.
        examples: an array of `EXAMPLE`.
        linked: an array of `LINK`, the number of links of each head and token.
        tokens: how often each token is a query with a choice, an array of `LINK` for layer 0.
    """

    texts: Tensor
    layers: list[LayerState]
    examples: np.ndarray
    linked: np.ndarray
    tokens: np.ndarray

    def write(self, path: Path) -> Path:
        """Write the state to a file, in one move. Raises `BadValue` if the disk is full."""
        tensors = {"texts": self.texts}
        for name in ("examples", "linked", "tokens"):
            tensors[name] = torch.from_numpy(getattr(self, name).view(np.uint8).copy())
        for number, layer in enumerate(self.layers):
            parts = {"sums": layer.sums, "queries": layer.queries, "uniform": layer.uniform}
            parts["counts"] = layer.counts.int()  # a shard has fewer than 2^31 queries
            tensors |= {f"{number}.{name}": x for name, x in parts.items()}
        modules = [layer.module for layer in self.layers]
        return atomic_io.write(path, tensors, {"modules": modules})


def read_state(path: Path) -> State:
    """Read the state of a shard. Raises `BadValue` for a missing or damaged file."""
    tensors, about = atomic_io.read(path)
    layers = [
        LayerState(
            module,
            tensors[f"{number}.sums"],
            tensors[f"{number}.queries"],
            tensors[f"{number}.uniform"],
            tensors[f"{number}.counts"].long(),
        )
        for number, module in enumerate(about["modules"])
    ]
    records = {
        name: tensors[name].numpy().view(dtype)
        for name, dtype in (("examples", EXAMPLE), ("linked", LINK), ("tokens", LINK))
    }
    return State(tensors["texts"], layers, **records)


def is_readable(path: Path) -> bool:
    """Return whether a file is complete: its header fits its size."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError):
        return False
    ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + size + max(ends, default=0)
