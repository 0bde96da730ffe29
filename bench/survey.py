"""Measure the cost of a survey: the time of sets of metrics over that of the model alone.

    python -m bench.survey --model DIR --tokens 1024 --contexts 2
    python -m bench.survey --model DIR --metrics basic basic,values,long --eager-up-to 0
    python -m bench.survey --model DIR --tokens 32768 --layers 2 --rounds 1 --eager-up-to 1024

It uses one thread, and reads the standard library of Python, file after file. In each round the
model, its survey and an eager pipeline run once, in a random order. The table has the medians of
the ratios of a round. Times are processor times, because other programs may share the machine.

The eager pipeline returns the weights of all layers (`output_attentions`), and computes those of
`basic` with plain torch; what follows from them is the same code: sums, histograms, examples.
With `--layers`, the model has its first layers alone; all have one shape, so ratios change little.
"""

import argparse
import random
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import clearhead as ch
from clearhead.core.engines.cpu import status
from clearhead.core.functional.ambient import FollowedCall
from clearhead.core.masks import Grid, Mask
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import Result, Statistic, TopWeights, mass, topk
from clearhead.corpus.basic import basic
from clearhead.corpus.collect import Collector, state_of
from clearhead.corpus.corpus import Cutter, Shard
from clearhead.corpus.metric import Batch
from clearhead.corpus.metric_sets import chosen_metrics, entries_of
from clearhead.corpus.reader import Reader, open_reader
from clearhead.corpus.state import State
from clearhead.corpus.texts import Text
from clearhead.hf import Checkpoint
from clearhead.models.inspect.recording import Call

MODEL, EAGER = "the model", "eager, the statistics of `basic`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--contexts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, help="of the model; all by default")
    parser.add_argument("--metrics", nargs="+", default=["basic"])
    parser.add_argument("--eager-up-to", type=int, default=1024, help="tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    tokens, contexts = arguments.tokens, arguments.contexts
    reader = open_reader(Checkpoint(arguments.model), None)
    if arguments.layers is not None:
        del reader.module.layers[arguments.layers :]
    shard = library_shard(reader, tokens, contexts)
    kinds = runs(reader, shard, arguments.metrics, eager=tokens <= arguments.eager_up_to)
    seconds = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name in random.sample(list(kinds), len(kinds)):
            start = time.process_time()
            kinds[name]()
            seconds[name].append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{reader.name}, {len(reader.module.layers)} layers, {contexts} contexts of {tokens} "
        f"tokens, engine `cpu`: {status()}. {arguments.rounds} rounds, peak {peak:.1f} GB.\n"
    )
    print("| run | seconds | times the model |\n|---|---|---|")
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, seconds[MODEL], strict=True))
        print(f"| {name} | {statistics.median(own):.1f} | {ratio:.2f} |")


def library_shard(reader: Reader, tokens: int, contexts: int) -> Shard:
    """Return full contexts of the files of the standard library, joined in the order of names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    needed = tokens * contexts
    joined = ""
    for file in files:
        joined += file.read_text(encoding="utf-8")
        if len(joined) > 8 * needed:  # characters; a token has about three
            break
    cutter = Cutter(reader, tokens, needed)
    return next(cutter.cut(iter([Text("library", joined)]), needed))


def runs(
    reader: Reader, shard: Shard, sets: Sequence[str], *, eager: bool
) -> dict[str, Callable[[], State | None]]:
    """Return what is timed, by name: the model, a survey of each set, and the eager pipeline."""
    longest = int(shard.lengths.max())
    most = max(4096, longest)

    def alone() -> None:
        for batch in shard.batches(most):
            reader.run(batch.ids)

    def survey(name: str) -> State:
        metrics = chosen_metrics(entries_of(name), reader, longest)
        return state_of(
            reader, metrics, shard, seed=0, batch_tokens=most, advance=lambda tokens: None
        )

    def with_matrices() -> State:
        reader.module.set_attn_implementation("eager")
        try:
            collector = Collector(basic(longest), shard, 0, reader.spaced)
            return eager_state(reader, collector, shard.batches(longest))
        finally:
            reader.module.set_attn_implementation("clearhead")

    surveys = {f"`{name}`": partial(survey, name) for name in sets}
    return {MODEL: alone} | surveys | ({EAGER: with_matrices} if eager else {})


def eager_state(reader: Reader, collector: Collector, batches: Sequence[Batch]) -> State:
    """Return the state of a shard from the weights that a causal model returns."""
    for batch in batches:
        requested, (B, T) = collector.begin(batch), batch.ids.shape
        masses = next(s for s in requested if isinstance(s, mass))
        keys = torch.stack([cells(mask, B, T) for mask in masses.groups.values()], dim=-1).float()
        with torch.no_grad():
            out = reader.module(input_ids=batch.ids, output_attentions=True, use_cache=False)
        for layer, weights in enumerate(out.attentions):
            H = weights.shape[1]
            x = torch.zeros(B, H, T, 1)
            problem, inputs = make_problem(x, x, x, Options(mask=ch.causal))
            results = {s.name: dense(s, weights, keys) for s in requested}
            call = Call(layer, f"layers.{layer}", "", results)
            collector.receive(call, FollowedCall(problem, inputs, x, inputs))
    return collector.state()


def dense(statistic: Statistic, weights: Tensor, keys: Tensor) -> Result:
    """Compute a statistic of `basic` from weights, (B, H, T, T); `keys` is (B, T, T, groups)."""
    if isinstance(statistic, mass):
        masses = torch.einsum("bhqk,bqkg->gbhq", weights, keys)
        return dict(zip(statistic.groups, masses, strict=True))
    if isinstance(statistic, topk):
        return TopWeights(*weights.topk(min(statistic.n, weights.shape[-1])))
    assert statistic.name == "entropy"
    return -torch.xlogy(weights, weights).sum(-1)


def cells(mask: Mask, B: int, T: int) -> Tensor:
    """Return which keys each query may look at, (B, T, T)."""
    b, q = torch.arange(B).view(B, 1, 1), torch.arange(T).view(T, 1)
    zero = torch.zeros(1, dtype=torch.long)
    return mask.allowed(Grid(T, T, B, 1), b, zero, q, torch.arange(T)).expand(B, T, T)


if __name__ == "__main__":
    main()
