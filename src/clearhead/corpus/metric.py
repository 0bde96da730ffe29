"""Define what a metric is: one number for each head and query of a batch of contexts.

Everything else of a survey (means with intervals, histograms, examples) follows from these numbers,
so a metric of your own is a class like this one:

    class OnDigits(Mass):
        name, formula, source = "on_digits", "weight on tokens that are digits", "us, 2026"

        def group(self, batch):
            return dense(keep=batch.matches(str.isdigit)[:, None, None])

Letters: B contexts, H query heads, T tokens of a context.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..core.errors import AttentionError, BadValue
from ..core.masks import Mask
from ..core.problem.problem import Inputs, Problem
from ..core.stats import Result, Statistic, mass
from .inference import Limits


@dataclass(frozen=True)
class Bins:
    """The fixed bins of a histogram, `count` equal ones from `low` to `high`.

    With `log`, their logarithms have equal widths. A value outside counts in the nearest bin.
    `bounds` are the least and largest mean that is possible, where intervals end: None in place of
    a number that does not exist, and in place of both if they are `low` and `high`.
    """

    low: float = 0.0
    high: float = 1.0
    count: int = 100
    log: bool = False
    bounds: Limits | None = None

    @property
    def limits(self) -> Limits:
        """The least and largest possible mean."""
        return (self.low, self.high) if self.bounds is None else self.bounds

    def edges(self) -> list[float]:
        """Return the `count` + 1 edges of the bins."""
        low, high = self.ends
        edges = [low + (high - low) * i / self.count for i in range(self.count + 1)]
        return [math.exp(edge) for edge in edges] if self.log else edges

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the bins, or of their logarithms."""
        return (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)


def slices_of(every: "Sequence[Bins]") -> list[slice]:
    """Return the part of each metric in an array of all bins, one after the other."""
    ends = [*accumulate(bins.count for bins in every)]
    return [slice(end - bins.count, end) for end, bins in zip(ends, every, strict=True)]


def bins_of(every: "Sequence[Bins]", values: Tensor) -> Tensor:
    """Return the bin of each value as int64: `values[m]` in the bins `every[m]`."""
    scaled = [
        x.clamp(min=1e-30).log() if bins.log else x for bins, x in zip(every, values, strict=True)
    ]
    ends = [(*bins.ends, bins.count) for bins in every]
    numbers = [[low, count / (high - low), count - 1] for low, high, count in ends]
    shape = -1, *[1] * (values.ndim - 1)
    low, scale, last = (values.new_tensor(x).view(shape) for x in zip(*numbers, strict=True))
    return ((torch.stack(scaled) - low) * scale).long().clamp_(min=0).minimum(last.long())


FRACTION = Bins()
YES_OR_NO = Bins(count=2)


@dataclass(frozen=True, eq=False)
class Batch:
    """Contexts of equal length that the model reads at once. Nothing is padded.

    Attributes:
        ids: the token ids, (B, T).
        texts: the number of each context's text in the corpus.
        contexts: the number of each context in its text.
        spelling: the text of each token id.
        separators: True for punctuation and ends of lines, (B, T).
        pixels: pictures whose patches are the tokens, (B, channels, height, width); None for texts.
    """

    ids: Tensor
    texts: Sequence[int]
    contexts: Sequence[int]
    spelling: Mapping[int, str]
    separators: Tensor
    pixels: Tensor | None = None

    def matches(self, test: Callable[[str], bool]) -> Tensor:
        """Return which tokens pass a test of their text without spaces around it, (B, T)."""
        known, numbers = self.ids.unique(return_inverse=True)
        passes = [test(self.spelling[i].strip()) for i in known.tolist()]
        return torch.tensor(passes, dtype=torch.bool)[numbers]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One attention call of the model on a batch, with what a metric requested.

    ``call["entropy"]`` is a result of `Metric.statistics`, by the name of the statistic.

    Attributes:
        layer: the number of the call in a run of the model, from 0.
        batch: the contexts.
        allowed: how many keys each query may look at, (B|1, 1, T).
        results: the statistics by name.
        problem, inputs, output: the call itself; None for uniform weights.
    """

    layer: int
    batch: Batch
    allowed: Tensor
    results: dict[str, Result]
    problem: Problem | None = field(default=None, repr=False)
    inputs: Inputs | None = field(default=None, repr=False)
    output: Tensor | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.results[name]


ComponentSums = dict[tuple[str, str], Tensor]  # (B, H) each, by side and component


class Metric:
    """One number for each head and query. Subclass it, and define `values`.

    Attributes:
        name: the name in the tables; lower case, with underscores.
        formula: what it computes, as text.
        source: where the definition is from.
        version: increase it if the numbers change; a survey with another version is refused.
        bins: the bins of its histogram.
        examples: whether examples of queries are stored for it.
        settings: values on which its numbers depend, besides the model; a survey with others is
            refused.
    """

    name: str = ""
    formula: str = ""
    source: str = "clearhead"
    version: int = 1
    bins: Bins = FRACTION
    examples: bool = True
    settings: Mapping[str, Any] = MappingProxyType({})

    def begin(self, batch: Batch) -> None:
        """Begin a batch, before the model runs; for a metric with a run of its own."""

    def statistics(self, batch: Batch) -> Sequence[str | Statistic]:
        """Return the statistics that `values` reads, as in ``watch(stats=...)``."""
        return ()

    def values(self, call: LayerCall) -> Tensor:
        """Compute the number of each query, (B, H, T).

        A subclass defines it: here it raises `NotImplementedError`.
        """
        raise NotImplementedError

    def components(self, batch: Batch, layer: int) -> ComponentSums:
        """Return what its sum over the queries that count consists of: rows of `reasons`."""
        return {}

    def counts(self, uniform: LayerCall) -> Tensor:
        """Return the queries over which the mean is taken, (B|1, 1, T).

        By default, these are the queries with a choice: with at least two keys to look at.
        """
        return uniform.allowed > 1

    def baseline(self, uniform: LayerCall) -> Tensor | None:
        """Compute the number for uniform weights on the same keys, (B|1, 1, T); None without one.

        `uniform` has one head, and no statistics of values.
        """
        return self.values(uniform)

    def __repr__(self) -> str:
        return f"{self.name}: {self.formula} ({self.source}; version {self.version})"


class WithoutBaseline(Metric):
    """A metric that is not defined for uniform weights."""

    def baseline(self, uniform: LayerCall) -> None:
        return None


class Mass(Metric):
    """The weight on a group of keys, a mask that `group` returns.

    The mean is over the queries that have a choice: at least one key of the group, and at least one
    other key.
    """

    def group(self, batch: Batch) -> Mask:
        """Return the keys of each query, as a mask.

        A subclass defines it: here it raises `NotImplementedError`.
        """
        raise NotImplementedError

    def statistics(self, batch: Batch) -> Sequence[mass]:
        return [mass({"group": self.group(batch)})]

    def values(self, call: LayerCall) -> Tensor:
        weight: Tensor = call["mass"]["group"]
        return weight

    def counts(self, uniform: LayerCall) -> Tensor:
        inside = (self.values(uniform) * uniform.allowed).round()
        return (inside > 0) & (inside < uniform.allowed)


@contextmanager
def needed_by(name: str, needs: str) -> Iterator[None]:
    """Raise what a set of metrics needs, and why a model is refused, as one error."""
    try:
        yield
    except AttentionError as error:
        gave = f"metrics has {name!r}, which needs {needs}. {error.gave}"
        raise BadValue(gave, error.rule, f"leave out {name!r}, or: {error.hint}") from error
