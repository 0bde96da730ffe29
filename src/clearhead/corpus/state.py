"""The state of a shard: sums, counts, examples and links, which merge exactly with other states.

Its file is small: numbers are compressed, a sum of a text is rounded to float32 as its terms are,
and the hash of an example is computed again from its text and position. It has a digest of its own,
and the origin of its numbers, so that it is never taken for the state of another shard.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.files import atomic_io
from .damage import damaged
from .examples import EXAMPLE, hashes
from .looks import SHAPE
from .packing import packed, packed_records, unpacked, unpacked_records
from .token_counts import LINK

FOLDER = "states"
STORED = {  # the fields of each array of records
    "examples": [name for name in EXAMPLE.names or () if name != "hash"],
    "linked": [*(LINK.names or ())],
    "tokens": ["token", "count"],
}
# The arrays of a layer, as they are stored.
LAYER = {
    "sums": np.float32, "queries": np.int64, "uniform": np.float64, "counts": np.int32,
    "looks": np.int32, "chances": np.float64,
}  # fmt: skip


@dataclass(eq=False)
class LayerState:
    """The sums of one layer, of H heads and M metrics over n texts.

    Attributes:
        module: the name of the module that calls attention.
        key_heads: the number of its key heads.
        sums: the sum of each metric over the queries of each text, (n, H, M) in float64.
        queries: the number of these queries, (n, M) in int64.
        uniform: the sum of each metric for uniform weights, (M,) in float64; NaN without one.
        counts: the histograms of all metrics, one after the other, (H, bins) in int64.
        looks: which kinds of keys the queries of each text look at, (n, H, *looks.SHAPE) in int32.
        chances: the sum of uniform weights on the keys of each behaviour, by the class of the
            query, (C, behaviours) in float64; NaN if the survey has not all their metrics.
    """

    module: str
    key_heads: int
    sums: Tensor
    queries: Tensor
    uniform: Tensor
    counts: Tensor
    looks: Tensor
    chances: Tensor


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

    def write(self, path: Path, origin: str) -> Path:
        """Write the state to a file, in one move. Raises `BadValue` if the disk is full.

        The file has the `origin` of the state, that of `Manifest.origin`.
        """
        tensors = {"texts": self.texts}
        for name, fields in STORED.items():
            tensors |= packed_records(name, getattr(self, name), fields)
        for number, layer in enumerate(self.layers):
            for name, dtype in LAYER.items():
                tensors[f"{number}.{name}"] = packed(getattr(layer, name).numpy().astype(dtype))
        modules = [layer.module for layer in self.layers]
        heads = [[len(layer.counts), layer.key_heads] for layer in self.layers]
        about: dict[str, Any] = {"modules": modules, "heads": heads, "origin": origin}
        return atomic_io.write(path, tensors, about | {"digest": _digest(tensors, about)})


def read_state(path: Path, origin: str, seed: int) -> State:
    """Read the state of the shard with this origin, of a survey with this seed.

    Raises `BadValue` for a missing or damaged file, and for the state of another shard.
    """
    tensors, about = atomic_io.read(path)
    if about.get("origin") != origin:
        raise damaged(path, "it is the state of another shard, or of another survey")
    if about.pop("digest", None) != _digest(tensors, about):
        raise damaged(path, "its contents do not have its digest")
    texts = tensors["texts"]
    layers = []
    for number, (module, (H, G)) in enumerate(zip(about["modules"], about["heads"], strict=True)):
        sums, queries, uniform, counts, looks, chances = (
            torch.from_numpy(unpacked(tensors[f"{number}.{name}"], np.dtype(dtype)))
            for name, dtype in LAYER.items()
        )
        M = len(uniform)
        layers.append(
            LayerState(
                module,
                G,
                sums.double().view(len(texts), H, M),
                queries.view(len(texts), M),
                uniform,
                counts.long().view(H, -1),
                looks.view(len(texts), H, *SHAPE),
                chances.view(SHAPE[0], -1),
            )
        )
    examples, linked, tokens = (
        unpacked_records(name, tensors, dtype, STORED[name])
        for name, dtype in (("examples", EXAMPLE), ("linked", LINK), ("tokens", LINK))
    )
    examples["hash"] = hashes(seed, examples["text"], examples["context"], examples["query"])
    return State(texts, layers, examples, linked, tokens)


def is_state_of(path: Path, origin: str) -> bool:
    """Return whether a file is complete, by its header, and the state with this origin."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return bool((file.metadata() or {}).get("origin") == json.dumps(origin))
    except (OSError, SafetensorError):
        return False


def _digest(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    """Return a digest of all that a file has."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()[:16]
