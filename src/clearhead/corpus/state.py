"""The state of a shard: sums, counts, examples and links, which merge exactly with other states.

Its file is small: numbers are compressed, a sum of a text is rounded to float32 as its terms are,
and the hash of an example is computed again from its text and position. It has the origin of its
numbers, so that it is never taken for the state of another shard, and two parts, each with a
digest of its own: the totals of the shard, and the sums of its texts. A merge reads first the one,
then the other.

Numbers are compressed column by column, and byte by byte of equal significance: neighbours in a
column differ little, so their high bytes are almost all equal.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.files import atomic_io
from .corpus import damaged
from .examples import EXAMPLE, OF_QUERY, hashes, sample_type
from .looks import SHAPE
from .manifest import Manifest, ShardEntry
from .token_counts import LINK

FOLDER = "states"
TEXTS, TOTALS = "texts.", "totals."  # the names of the tensors of each part begin with it
PLACE = [name for name in OF_QUERY if name != "hash"]
STORED = {  # the fields of each array of records
    "examples": [name for name in EXAMPLE.names or () if name != "hash"],
    "linked": [*(LINK.names or ())],
    "tokens": ["token", "count"],
}
SAMPLE_FIELDS = [*PLACE, "values", "keys", "weights"]
# The arrays of a layer, as they are stored: sums of texts, and what only has totals.
OF_TEXTS = {"sums": np.float32, "queries": np.int64, "looks": np.int32}
TOTAL_OF_TEXTS = {"sums": np.float64, "queries": np.int64, "looks": np.int64}
OF_SHARD = {"uniform": np.float64, "counts": np.int64, "chances": np.float64}


@dataclass(eq=False)
class LayerState:
    """The sums of one layer, of H heads and M metrics over n texts.

    Attributes:
        module: the name of the module that calls attention.
        key_heads: the number of its KV heads.
        parts: the side and the component of each further sum.
        sums: the sum of each metric over the queries of each text, and P further ones,
            (n, H, M + P) in float64.
        queries: the number of these queries, (n, M + P) in int64.
        uniform: the sum of each metric for uniform weights, (M,) in float64; NaN without one.
        counts: the histograms of all metrics, one after the other, (H, bins) in int64.
        looks: which kinds of keys the queries of each text look at, (n, H, *looks.SHAPE) in int32.
        chances: the sum of uniform weights on the keys of each behaviour, by the class of the
            query, (C, behaviours) in float64; NaN if the survey has not all their metrics.
        sample: the sampled queries, an array of `examples.sample_type`.
    """

    module: str
    key_heads: int
    parts: list[list[str]]
    sums: Tensor
    queries: Tensor
    uniform: Tensor
    counts: Tensor
    looks: Tensor
    chances: Tensor
    sample: np.ndarray


@dataclass(eq=False)
class State:
    """What a shard, or several merged ones, leave of the corpus.

    Attributes:
        texts: the numbers of the texts, (n,), in rising order.
        layers: the sums of each layer. In totals, those of all texts are one row.
        examples: the largest values, an array of `EXAMPLE`.
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
        tensors, totals = {f"{TEXTS}numbers": packed(self.texts.numpy())}, []
        for number, layer in enumerate(self.layers):
            sums: dict[str, Any] = {}
            for name, dtype in OF_TEXTS.items():
                stored = getattr(layer, name).numpy().astype(dtype)
                tensors[f"{TEXTS}{number}.{name}"] = packed(stored)
                total = stored.sum(0, dtype=TOTAL_OF_TEXTS[name], keepdims=True)
                sums[name] = torch.from_numpy(total)
            totals.append(replace(layer, **sums))
        return replace(self, layers=totals).write_totals(path, origin, tensors)

    def write_totals(
        self, path: Path, origin: str, of_texts: dict[str, Tensor] | None = None
    ) -> Path:
        """Write totals to a file, in one move, for `read_totals`; and tensors `of_texts`."""
        tensors = dict(of_texts or {})
        for name, fields in STORED.items():
            tensors |= packed_records(f"{TOTALS}{name}", getattr(self, name), fields)
        for number, layer in enumerate(self.layers):
            for name, dtype in (TOTAL_OF_TEXTS | OF_SHARD).items():
                array = getattr(layer, name).numpy().astype(dtype)
                tensors[f"{TOTALS}{number}.{name}"] = packed(array)
            tensors |= packed_records(f"{TOTALS}{number}.sample", layer.sample, SAMPLE_FIELDS)
        modules = [layer.module for layer in self.layers]
        heads = [[len(layer.counts), layer.key_heads] for layer in self.layers]
        metrics = [len(self.layers[0].uniform), self.layers[0].sample["values"].shape[-1]]
        about: dict[str, Any] = {"modules": modules, "heads": heads, "metrics": metrics}
        about["parts"] = [layer.parts for layer in self.layers]
        return write_parts(path, origin, tensors, about, (TEXTS, TOTALS))


def write_parts(
    path: Path, origin: str, tensors: dict[str, Tensor], about: dict[str, Any],
    parts: Sequence[str] = ("",),
) -> Path:  # fmt: skip
    """Write tensors and metadata, in one move, with a digest for each part of the names."""
    about = about | {"origin": origin}
    digests = {
        part: _digest({n: x for n, x in tensors.items() if n.startswith(part)}, about)
        for part in parts
    }
    return atomic_io.write(path, tensors, about | {"digests": digests})


def read_totals(path: Path, origin: str, seed: int) -> State:
    """Read the totals of the shard with this origin, of a survey with this seed.

    Raises `BadValue` for a missing or damaged file, and for the state of another shard.
    """
    tensors, about = read_part(path, origin, TOTALS)
    layers = []
    _, M = about["metrics"]
    for number, (module, (H, G)) in enumerate(zip(about["modules"], about["heads"], strict=True)):
        arrays = _arrays(tensors, number, TOTAL_OF_TEXTS | OF_SHARD, 1, H)
        sample = unpacked_records(f"{number}.sample", tensors, sample_type(H, M), SAMPLE_FIELDS)
        parts = about["parts"][number]
        layers.append(LayerState(module, G, parts, **arrays, sample=_with_hashes(sample, seed)))
    examples, linked, tokens = (
        unpacked_records(name, tensors, dtype, STORED[name])
        for name, dtype in (("examples", EXAMPLE), ("linked", LINK), ("tokens", LINK))
    )
    return State(torch.zeros(1), layers, _with_hashes(examples, seed), linked, tokens)


def read_sums(path: Path, origin: str) -> Iterator[tuple[int, list[list[Tensor]]]]:
    """Yield the number of each text, and its sums in each layer: the arrays of `OF_TEXTS`.

    Raises `BadValue` as `read_totals`.
    """
    tensors, about = read_part(path, origin, TEXTS)
    texts = unpacked(tensors["numbers"], np.dtype(np.int64))
    layers = []
    for number, (H, _) in enumerate(about["heads"]):
        sums, queries, looks = _arrays(tensors, number, OF_TEXTS, len(texts), H).values()
        layers.append([sums.double(), queries, looks])
    for row, text in enumerate(texts.tolist()):
        yield text, [[x[row] for x in layer] for layer in layers]


def _arrays(
    tensors: dict[str, Tensor], layer: int, dtypes: dict[str, Any], texts: int, H: int
) -> dict[str, Tensor]:
    """Return arrays of a layer of H heads, stored in these dtypes, some of them for each text."""
    shapes = {
        "sums": (texts, H, -1), "queries": (texts, -1), "looks": (texts, H, *SHAPE),
        "uniform": (-1,), "counts": (H, -1), "chances": (SHAPE[0], -1),
    }  # fmt: skip
    stored = {name: unpacked(tensors[f"{layer}.{name}"], np.dtype(x)) for name, x in dtypes.items()}
    return {name: torch.from_numpy(x).view(shapes[name]) for name, x in stored.items()}


def read_part(path: Path, origin: str, part: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a part of what `write_parts` wrote, and check it."""
    tensors, about = atomic_io.read(path, part)
    if about.get("origin") != origin:
        raise damaged(path, "it is the state of another shard, or of another survey")
    if about.pop("digests", {}).get(part) != _digest(tensors, about):
        raise damaged(path, "its contents do not have its digest")
    return {name.removeprefix(part): x for name, x in tensors.items()}, about


def _with_hashes(records: np.ndarray, seed: int) -> np.ndarray:
    records["hash"] = hashes(seed, records["text"], records["context"], records["query"])
    return records


def file_of(out: Path, manifest: Manifest, entry: ShardEntry) -> tuple[Path, str]:
    """Return the file of the state of a shard, and its origin."""
    return out / FOLDER / entry.state, manifest.origin(entry)


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


def packed(array: np.ndarray) -> Tensor:
    """Compress the numbers of an array; `unpacked` needs their dtype."""
    numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    planes = numbers.reshape(-1, array.itemsize).T
    return torch.frombuffer(bytearray(zlib.compress(planes.tobytes())), dtype=torch.uint8)


def unpacked(data: Tensor, dtype: np.dtype) -> np.ndarray:
    """Return the numbers, (n,)."""
    planes = np.frombuffer(zlib.decompress(data.numpy().tobytes()), np.uint8)
    return planes.reshape(dtype.itemsize, -1).T.copy().view(dtype).reshape(-1)


def packed_records(name: str, records: np.ndarray, fields: Sequence[str]) -> dict[str, Tensor]:
    """Compress some fields of an array of records, as tensors named `name`.`field`."""
    return {f"{name}.{field}": packed(records[field]) for field in fields}


def unpacked_records(
    name: str, tensors: dict[str, Tensor], dtype: np.dtype, fields: Sequence[str]
) -> np.ndarray:
    """Return records with the fields that `packed_records` compressed; the others are 0."""
    columns = {x: unpacked(tensors[f"{name}.{x}"], dtype[x].base) for x in fields}
    count = len(columns[fields[0]]) // int(np.prod(dtype[fields[0]].shape))
    records = np.zeros(count, dtype)
    for field, column in columns.items():
        records[field] = column.reshape(count, *dtype[field].shape)
    return records
