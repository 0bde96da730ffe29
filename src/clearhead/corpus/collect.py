"""Compute the state of a shard: run the model on its batches, and reduce every attention call."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.errors import AttentionError, BadValue
from ..core.functional.ambient import FollowedCall, statistics_of
from ..core.masks import Mask
from ..core.problem.problem import Inputs, Problem
from ..core.stats import Statistics, TopWeights, Varying
from ..models.follow.uniform import uniform_call
from ..models.inspect.recording import Call
from ..models.inspect.watcher import Watcher
from .basic import Largest, fits_of, kinds_of
from .corpus import Shard
from .examples import EXAMPLE, LayerExamples, Queries
from .fold import must_have_layers
from .groups import Pile
from .looks import BEHAVIOURS, NAMES, SHAPE, add_looks, sum_by_class, token_classes
from .metric import Batch, LayerCall, Metric, bins_of, slices_of
from .reader import Reader
from .requests import Requests
from .state import LayerState, State
from .token_counts import LINK, links_of, merged, tokens_of

TOP = Largest()  # requests the largest weights, for examples and links
AT_ONCE = 2**20  # numbers of metrics that are reduced together


def state_of(
    reader: Reader, metrics: Sequence[Metric], shard: Shard, seed: int, batch_tokens: int,
    advance: Callable[[int], None],
) -> State:  # fmt: skip
    """Compute the state of a shard. After each batch, `advance` receives its number of tokens.

    Raises `BadValue` if a metric is NaN or infinite, and for attention between two texts.
    """
    collector = Collector(metrics, shard, seed, reader.spaced)
    watcher = Watcher(reader.module, collector.receive)
    for batch in shard.batches(batch_tokens):
        watcher.use(collector.begin(batch))
        with watcher.hooked():
            reader.run(batch.ids, batch.pixels)
        advance(batch.ids.numel())
    watcher.check_recorded()
    return collector.state()


class Collector:
    """Reduces the attention calls of a shard, batch by batch."""

    def __init__(self, metrics: Sequence[Metric], shard: Shard, seed: int, spaced: bool) -> None:
        self.metrics, self.seed, self.spaced = list(metrics), seed, spaced
        self.texts = shard.texts.unique().long()
        self.layers: list[LayerState] = []
        self.examples: list[LayerExamples] = []
        self.sampled = [number for number, metric in enumerate(metrics) if metric.examples]
        self.linked, self.tokens = (Pile(merged, np.zeros(0, LINK)) for _ in range(2))
        self.bins = slices_of([metric.bins for metric in metrics])

    def begin(self, batch: Batch) -> Statistics:
        """Begin a batch. Returns the statistics to compute."""
        self.batch = batch
        for metric in self.metrics:
            metric.begin(batch)
        self.requests = Requests([*self.metrics, TOP], batch)
        self.rows = torch.searchsorted(self.texts, torch.tensor(batch.texts))
        self.classes = token_classes(batch.ids, batch.spelling, self.spaced)
        if batch.pixels is not None:
            self.classes.fill_(NAMES.index("other"))
        self.queries = Queries(self.seed, batch, self.classes)
        self._uniform: list[tuple[Mask, _Uniform]] = []
        return self.requests.statistics

    def receive(self, call: Call, followed: FollowedCall) -> None:
        """Reduce one attention call."""
        problem = followed.problem
        self.must_read_one_text(call, problem)
        uniform = self.uniform(problem, followed.inputs)
        parts = {
            of: (number, sums)
            for number, metric in enumerate(self.metrics)
            for of, sums in metric.components(self.batch, call.layer).items()
        }
        names = [*map(list, parts)]
        if call.layer == len(self.layers):
            self.add_layer(call, problem, names)
        layer, examples = self.layers[call.layer], self.examples[call.layer]
        must_have_layers(layer.parts, names)
        for column, (number, sums) in enumerate(parts.values(), len(self.metrics)):
            layer.sums[..., column].index_add_(0, self.rows, sums.double())
            layer.queries[:, column].index_add_(0, self.rows, uniform.counts[number].sum(-1))
        top = self.requests.results_of(TOP, call.statistics)["topk"]
        assert isinstance(top, TopWeights)
        examples.begin([uniform.counts[number] for number in self.sampled], self.queries, top)
        of_metrics = (self.values(metric, call, followed, uniform) for metric in self.metrics)
        for numbers, values in _stacks(of_metrics):
            counts = torch.stack(uniform.counts[numbers])
            self.reduce(call.layer, numbers, values, counts)
            examples.add(numbers, values, counts)
        layer.uniform += torch.tensor(uniform.sums, dtype=torch.float64)
        examples.select()
        if self.batch.pixels is None:  # kinds of keys are those of texts
            looks_at = kinds_of(self.batch, top.keys), fits_of(self.batch, top.keys)
            add_looks(layer.looks, self.rows, self.classes, *looks_at, uniform.chooses)
        layer.chances += uniform.chances
        self.linked.add(links_of(call.layer, top.keys[..., 0], uniform.chooses, self.batch))
        if call.layer == 0:
            self.tokens.add(tokens_of(uniform.chooses, self.batch))

    def values(
        self, metric: Metric, call: Call, followed: FollowedCall, uniform: "_Uniform"
    ) -> Tensor:
        """Compute a metric. Raises `BadValue` for an error, and for numbers of another shape."""
        problem, results = followed.problem, self.requests.results_of(metric, call.statistics)
        of = call.layer, self.batch, uniform.allowed, results
        try:
            values = metric.values(LayerCall(*of, problem, followed.inputs, followed.out))
            values = values if values.dtype == torch.float32 else values.double()
        except AttentionError:
            raise
        except Exception as error:  # which would look like an error of the model
            gave = f"The metric {metric.name} raised {type(error).__name__}: {error}."
            rule = "a metric computes a number for every query of any context, also of one token."
            hint = "correct its method `values`; shards that are finished stay valid."
            raise BadValue(gave, rule, hint) from error
        shape = problem.B, problem.H, problem.Tq
        if values.shape != shape:
            gave = f"The metric {metric.name} returned numbers of shape {tuple(values.shape)}."
            rule = f"a metric has one number for each context, head and query: {shape}."
            raise BadValue(gave, rule, "check what its method `values` returns.")
        return values

    def reduce(self, number: int, numbers: slice, values: Tensor, counts: Tensor) -> None:
        """Add the values of metrics in a layer, (M, B, H, T), where they count, (M, B, T)."""
        layer, ignored, H = self.layers[number], ~counts.unsqueeze(2), values.shape[2]
        sums = values.double().masked_fill(ignored, 0.0).sum(-1)
        if not sums.isfinite().all():
            self.check_numbers(numbers, values, counts, number)
        layer.sums[..., numbers].index_add_(0, self.rows, sums.permute(1, 2, 0))
        layer.queries[:, numbers].index_add_(0, self.rows, counts.sum(-1).T)
        parts = self.bins[numbers]
        part = layer.counts[:, parts[0].start : parts[-1].stop]
        size, of_metric = part.shape[1], torch.tensor([x.start - parts[0].start for x in parts])
        index = bins_of([metric.bins for metric in self.metrics[numbers]], values)
        index += of_metric.view(-1, 1, 1, 1) + torch.arange(H).unsqueeze(-1) * size
        index = index.masked_fill(ignored, H * size)  # beyond all bins
        part += index.flatten().bincount(minlength=H * size + 1)[:-1].view(H, size)

    def add_layer(self, call: Call, problem: Problem, parts: list[list[str]]) -> None:
        n, H, M, P = len(self.texts), problem.H, len(self.metrics), len(parts)
        number, count = torch.float64, torch.int64
        self.layers.append(
            LayerState(
                call.module, problem.G, parts, sums=torch.zeros(n, H, M + P, dtype=number),
                queries=torch.zeros(n, M + P, dtype=count), uniform=torch.zeros(M, dtype=number),
                counts=torch.zeros(H, self.bins[-1].stop, dtype=count),
                looks=torch.zeros(n, H, *SHAPE, dtype=torch.int32),
                chances=torch.zeros(SHAPE[0], len(BEHAVIOURS), dtype=number), sample=np.zeros(0),
            )
        )  # fmt: skip
        self.examples.append(LayerExamples(call.layer, H, self.sampled))

    def uniform(self, problem: Problem, inputs: Inputs) -> "_Uniform":
        """Return what depends on the mask alone. It is computed once for layers with one mask."""
        known = next((x for mask, x in self._uniform if mask == problem.mask), None)
        if known is None:
            known = _Uniform(self, problem, inputs)
            self._uniform.append((problem.mask, known))
        return known

    def must_read_one_text(self, call: Call, problem: Problem) -> None:
        shape = tuple(self.batch.ids.shape)
        if (problem.B, problem.Tq) != shape or problem.Tk != problem.Tq:
            gave = f"Layer {call.layer} has {problem.B} x {problem.Tq} queries, {problem.Tk} keys."
            rule = f"a survey reads attention within its {shape[0]} contexts of {shape[1]} tokens."
            hint = "pass the part of the model that does this, such as its encoder or decoder."
            raise BadValue(gave, rule, hint)

    def check_numbers(self, numbers: slice, values: Tensor, counts: Tensor, layer: int) -> None:
        """Raise `BadValue` for NaN and infinity."""
        if not (wrong := ~values.isfinite() & counts.unsqueeze(2)).any():
            return
        m, b, h, t = wrong.nonzero()[0].tolist()
        number = "NaN" if values[m, b, h, t].isnan() else "infinite"
        at = f"in text {self.batch.texts[b]}, context {self.batch.contexts[b]}, token {t}"
        gave = f"{self.metrics[numbers][m].name} is {number} in layer {layer}, head {h}, {at}."
        rule = "a survey has only numbers; shards that are finished stay valid."
        raise BadValue(gave, rule, "load the model in float32, or leave this text out.")

    def state(self) -> State:
        for layer, own in zip(self.layers, self.examples, strict=True):
            layer.sample = own.sample
        parts = [np.zeros(0, EXAMPLE), *(own.largest for own in self.examples)]
        linked, tokens = self.linked.result(), self.tokens.result()
        return State(self.texts, self.layers, np.concatenate(parts), linked, tokens)


def _stacks(values: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Stack metrics of one dtype, `AT_ONCE` numbers at a time, with the slice of their numbers."""
    first, run = 0, list[Tensor]()
    for x in values:
        if run and (x.dtype != run[0].dtype or (len(run) + 1) * x.numel() > AT_ONCE):
            yield slice(first, first + len(run)), torch.stack(run)
            first, run = first + len(run), []
        run.append(x)
    yield slice(first, first + len(run)), torch.stack(run)


class _Uniform:
    """What depends on the mask of a call, and not on its weights.

    Attributes:
        allowed: how many keys each query may look at, (B|1, 1, T).
        chooses: the queries with at least two of them, (B, T).
        counts: the queries over which the mean of each metric is taken, (B, T) each.
        sums: the sum of each metric for uniform weights over these queries; NaN without one.
        chances: the sums of uniform weights on the keys of each behaviour, over the queries of each
            class that choose, (C, behaviours); NaN without the metric of their mass.
    """

    def __init__(self, collector: Collector, problem: Problem, inputs: Inputs) -> None:
        batch, shape = collector.batch, collector.batch.ids.shape
        self.allowed = torch.full((1, 1, problem.Tq), problem.Tk)
        if problem.masked:
            self.allowed = problem.key_ranges.keys_per_query()
        if self.allowed.shape[1] > 1:
            rule = "a survey takes the mean of all heads of a layer over the same queries."
            hint = "survey the heads of each mask separately."
            raise BadValue("The heads of a layer have different masks.", rule, hint)
        of_weights = [
            s
            for s in collector.requests.statistics
            if s.factors is None and not isinstance(s, Varying)
        ]
        results = statistics_of(*uniform_call(problem, inputs), of_weights)
        self.chooses = (self.allowed[:, 0] > 1).expand(shape)
        self.counts: list[Tensor] = []
        self.sums: list[float] = []
        masses: dict[str, Tensor] = {}
        for metric in collector.metrics:
            own = collector.requests.results_of(metric, results)
            call = LayerCall(0, batch, self.allowed, own)
            counts = metric.counts(call)[:, 0].expand(shape)
            complete = len(own) == collector.requests.count_of(metric)
            baseline = metric.baseline(call) if complete else None
            self.counts.append(counts)
            if baseline is None:
                self.sums.append(float("nan"))
                continue
            masses[metric.name] = of_queries = baseline[:, 0].expand(shape)
            self.sums.append(float(of_queries[counts].double().sum()))
        missing = torch.full(shape, float("nan"))
        by_class = [
            sum_by_class(masses.get(name, missing), collector.classes, self.chooses)
            for name in BEHAVIOURS.values()
        ]
        self.chances = torch.stack(by_class, -1)
