"""Fold the states of all shards, divided among workers, in an order that follows from the shards.

The totals of `GROUP` shards are folded into one file, then those of `GROUP` such files, until one
is left. Then the sums of texts are read, for their deviations from the means: a file for `GROUP`
shards, and these add up. So each part of a state is read once, except the texts that continue in
the next group. Workers claim these files (`claims`), and a file of the same shards is used again.
The memory does not grow with the number of shards.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BadValue
from . import corpus, mixes, state
from .claims import share
from .corpus import read_shard
from .examples import largest, last_hashes, sampled
from .groups import Pile
from .inference import interval
from .manifest import Manifest, ShardEntry, digest_of
from .metric import Bins
from .state import LayerState, State
from .token_counts import merged

FOLDER, GROUP = "merged", 16


class OfText(NamedTuple):
    """The sums of one text in each layer, (H, M), its numbers of queries, (M,), and the kinds of
    keys at which they look, (H, *looks.SHAPE)."""

    text: int
    sums: list[Tensor]
    queries: list[Tensor]
    looks: list[Tensor]


def sums_of_texts(out: Path, manifest: Manifest, part: range | None = None) -> Iterator[OfText]:
    """Yield the sums of each text, also of one that continues in later shards.

    With `part`, the texts are those that begin in these shards.
    """
    part = range(len(manifest.shards)) if part is None else part
    first, last = manifest.shards[part.start], None
    earlier = first.text if first.context else None
    for number, entry in enumerate(manifest.shards[part.start :], part.start):
        beyond = number >= part.stop
        if beyond and not (last and entry.context and entry.text == last.text):
            break
        for text, layers in state.read_sums(*state.file_of(out, manifest, entry)):
            parts = [list(part) for part in zip(*layers, strict=True)]
            if last is not None and last.text == text:
                pairs = zip(last[1:], parts, strict=True)
                parts = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
            elif beyond:
                break
            elif last is not None:
                yield last
            if text != earlier:
                last = OfText(text, *parts)
    if last is not None:
        yield last


def totals(out: Path, manifest: Manifest, entry: ShardEntry) -> State:
    """Return the totals of a shard."""
    return state.read_totals(*state.file_of(out, manifest, entry), manifest.fixed["seed"])


class Fold:
    """The states of all shards of a survey, which are finished, as files of a few."""

    def __init__(self, out: Path, manifest: Manifest) -> None:
        self.out, self.manifest, self.folder = out, manifest, out / FOLDER
        self.every = range(len(manifest.shards))
        self.groups = _pieces(self.every, GROUP)

    def share(self) -> None:
        """Write the files that no other worker writes, until all are written.

        Raises `BadValue` for a damaged file.
        """
        self.share_totals()
        self.share_texts()

    def share_totals(self) -> None:
        """Fold the totals, group by group, until one file has those of all shards."""
        self.folder.mkdir(exist_ok=True)
        size = 1
        while size == 1 or size < len(self.every):
            children, size = size, GROUP * size
            for part in self._shared(_pieces(self.every, size), self._of_totals):
                of_parts = (self._totals(x, children) for x in _pieces(part, children))
                folded(of_parts).write_totals(*self._of_totals(part))

    def share_texts(self) -> None:
        """Write what is known of the texts of each group, when all totals are folded."""
        for part in self._shared(self.groups, self._of_texts):
            self._write_texts(part)

    def _shared(
        self, parts: Sequence[range], file: Callable[[range], tuple[Path, str]]
    ) -> Iterator[range]:
        return share(
            self.out, parts, lambda x: file(x)[0].name, lambda x: state.is_state_of(*file(x))
        )

    def _of_totals(self, part: range) -> tuple[Path, str]:
        """Return the file of the totals of some shards, and its origin."""
        origin = self.manifest.origin_of(part)
        name = f"{part.start:06d}-{part.stop:06d}-{origin}.safetensors"
        return self.folder / name, origin

    def _of_texts(self, part: range) -> tuple[Path, str]:
        """Return the file of the texts of some shards, and its origin."""
        origin = digest_of([self.manifest.digest, part.start])
        return self.folder / f"texts-{part.start:06d}-{origin}.safetensors", origin

    @cached_property
    def total(self) -> State:
        """The totals of all shards as one."""
        return self._totals(self.every, GROUP)

    def _totals(self, part: range, size: int) -> State:
        if size == 1:
            return totals(self.out, self.manifest, self.manifest.shards[part.start])
        return state.read_totals(*self._of_totals(part), self.manifest.fixed["seed"])

    def _write_texts(self, part: range) -> None:
        moments = Moments(self.total.layers)
        of_texts = (moments.add(text) for text in sums_of_texts(self.out, self.manifest, part))
        tensors = moments.tensors()
        for number, array in enumerate(mixes.apart_of(of_texts, looks_of(self.total))):
            tensors[f"mixes.{number}"] = torch.from_numpy(array)
        texts: list[tuple[Any, ...]] = []
        spelling: dict[str, str] = {}
        for entry in self.manifest.shards[part.start : part.stop]:
            shard = read_shard(self.out / corpus.FOLDER / entry.corpus)
            spelling |= {str(token): text for token, text in shard.spelling.items()}
            numbers, at, contexts = np.unique(shard.texts, return_inverse=True, return_counts=True)
            tokens = np.bincount(at, shard.lengths)
            names = [shard.names.get(text) for text in numbers.tolist()]
            texts += zip(numbers.tolist(), names, contexts.tolist(), tokens.tolist(), strict=True)
        about = {"texts": texts, "spelling": spelling}
        state.write_parts(*self._of_texts(part), tensors, about)

    def texts(self) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Yield what is known of the texts of each group: sums that add up, names, spellings."""
        for part in self.groups:
            yield state.read_part(*self._of_texts(part))


def _pieces(part: range, size: int) -> list[range]:
    return [part[i : i + size] for i in range(0, len(part), size)]


def folded(parts: Iterable[State]) -> State:
    """Return the totals of several parts of the corpus as one."""
    every = iter(parts)
    first = next(every)
    examples = Pile(largest, first.examples)
    linked, tokens = Pile(merged, first.linked), Pile(merged, first.tokens)
    for part in every:
        must_have_layers(*([[x.module, *x.parts] for x in y.layers] for y in (first, part)))
        for known, new in zip(first.layers, part.layers, strict=True):
            for name in (*state.TOTAL_OF_TEXTS, *state.OF_SHARD):
                getattr(known, name).add_(getattr(new, name))
            near = new.sample["hash"] <= last_hashes(known.sample).max(initial=-1)
            if near.any():
                known.sample = sampled(np.concatenate([known.sample, new.sample[near]]))
        examples.add(part.examples)
        linked.add(part.linked)
        tokens.add(part.tokens)
    return State(first.texts, first.layers, examples.result(), linked.result(), tokens.result())


def must_have_layers(known: list[list[Any]], new: list[list[Any]]) -> None:
    """Raise `BadValue` if the model made other calls, or its heads read other components."""
    if known != new:
        differ = [x for x in (*known, *new) if x not in known or x not in new][:2]
        gave = f"The model made {len(known)} and {len(new)} calls or parts, such as {differ}."
        rule = "a model makes the same attention calls for every context, of the same parts."
        hint = "survey a model, or a part of it, whose layers do not depend on the text."
        raise BadValue(gave, rule, hint)


def looks_of(total: State) -> np.ndarray:
    """Return the kinds of keys at which all heads look, (N, *looks.SHAPE)."""
    return np.concatenate([layer.looks[0].numpy() for layer in total.layers])


class Moments:
    """Sums over texts, for each layer.

    Attributes:
        texts: the number of texts with a query, (M,).
        apart: the sum of (mean of a text - mean), and that of its squares, (2, H, M).
        variance: the variance of the mean: the sum over texts of (mean without this text - mean)^2,
            (H, M). Texts are clusters, and their lengths differ (Bell and McCaffrey 2002, Survey
            Methodology 28: CR3).
    """

    def __init__(self, layers: list[LayerState]) -> None:
        self.sums, self.queries = [x.sums[0] for x in layers], [x.queries[0] for x in layers]
        self.means = [a / n.clamp(min=1) for a, n in zip(self.sums, self.queries, strict=True)]
        self.texts = [torch.zeros_like(x) for x in self.queries]
        self.apart = [torch.zeros(2, *x.shape, dtype=x.dtype) for x in self.sums]
        self.variance = [torch.zeros_like(x) for x in self.sums]

    def add(self, text: OfText) -> np.ndarray:
        """Add the sums of a text. Returns its looks, of all heads."""
        for layer, (sums, queries) in enumerate(zip(text.sums, text.queries, strict=True)):
            total, count, mean = self.sums[layer], self.queries[layer], self.means[layer]
            self.texts[layer] += queries > 0
            apart = (sums / queries.clamp(min=1) - mean) * (queries > 0)
            self.apart[layer] += torch.stack([apart, apart**2])
            self.variance[layer] += ((total - sums) / (count - queries) - mean) ** 2
        return torch.cat(text.looks).numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums by name; they change when texts are added."""
        every = {"texts": self.texts, "apart": self.apart, "variance": self.variance}
        return {f"{name}.{n}": x for name, of in every.items() for n, x in enumerate(of)}

    def numbers(self, layer: int, head: int, metric: int, bins: Bins) -> dict[str, Any]:
        queries, texts = int(self.queries[layer][metric]), int(self.texts[layer][metric])
        mean = float(self.sums[layer][head, metric]) / queries
        apart, squares = self.apart[layer][:, head, metric].tolist()
        low = high = sd = math.nan
        if texts > 1:
            variance = float(self.variance[layer][head, metric])
            low, high = interval(mean, variance, texts, bins.limits)
            sd = math.sqrt(max(squares - apart**2 / texts, 0.0) / (texts - 1))
        return {
            "mean": mean, "low": low, "high": high, "mean_of_texts": mean + apart / texts,
            "sd_of_texts": sd, "queries": queries, "texts": texts,
        }  # fmt: skip
