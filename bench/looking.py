"""Measure the time of `look` as a multiple of `attention`'s, for each statistic.

    python -m bench.looking --tokens 16 128 1024 4096

It uses one thread, float32, and causal heads of size 64: 8, or `--heads` on `--key-heads`. In each
round every statistic is timed in a random order, with `attention` just before or just after it, and
is read too. The ratios of a short text differ by 5 % from process to process, so the table has the
medians over several processes of their medians. Times are processor times, because other programs
may share the machine. `attention` is also compared with itself: the distance of that row from 1
shows the error of the others.
"""

import argparse
import multiprocessing
import random
import statistics

import torch

import clearhead as ch
from bench.timing import seconds_per_call
from clearhead import masks
from clearhead.core.engines.choice import choose
from clearhead.core.engines.cpu import can_count, status
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import Statistic, parse_stats

Statistics = dict[str, list[str | Statistic]]


def requests(tokens: int) -> Statistics:
    """Return the statistics to measure, by the names of their rows."""
    starts = [2**i for i in range((tokens - 1).bit_length())]
    distances = {str(n): ch.window(n - 1, 0, align=-n) for n in starts}  # n to 2 n - 1
    last = {f"last {n}": ch.window(n - 1, 0) for n in (1, 4, 16, 64, 256)}
    by_distance = {"first": ch.prefix(1), **last, **distances}
    ids = torch.multinomial(1 / torch.arange(1.0, 5001.0), tokens, True)  # as frequent as words
    by_id = {"copies": masks.duplicate_keys(ids), "after copies": masks.induction_keys(ids)}
    row: list[str | Statistic] = ["entropy", "max", ch.topk(1)]
    return {
        '`"lse"`': ["lse"],
        '`"entropy"`': ["entropy"],
        '`"entropy"`, `topk(3)`': ["entropy", ch.topk(3)],
        '`"received"`': ["received"],
        '`"received"`, `pooled(64, 64)`': ["received", ch.pooled(64, 64)],
        '`"entropy"`, `"max"`, `topk(1)`': row,
        f"these, mass of {len(by_distance)} distances": [*row, ch.mass(by_distance)],
        "these, mass of 2 groups by id": [*row, ch.mass(by_id)],
        "all of these": [*row, ch.mass(by_distance | by_id)],
        "all, as `value_weighted`": [
            *row,
            ch.value_weighted(by_distance | by_id, by=torch.rand(tokens)),
        ],
    }


AGAIN = "`attention` again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3, help="in each process")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    arguments = parser.parse_args()
    runs = [
        (tokens, arguments.rounds, arguments.heads, arguments.key_heads)
        for tokens in arguments.tokens
        for _ in range(arguments.processes)
    ]
    # A process for each run, one after the other.
    with multiprocessing.get_context("spawn").Pool(1, _start, maxtasksperchild=1) as pool:
        measured = pool.starmap(ratios, runs, chunksize=1)
    columns = []
    for tokens in arguments.tokens:
        of_processes = [x for run, x in zip(runs, measured, strict=True) if run[0] == tokens]
        medians = (
            statistics.median(x) for x in zip(*(x.values() for x in of_processes), strict=True)
        )
        columns.append(dict(zip(of_processes[0], medians, strict=True)))
    print(
        f"Engine `cpu`: {status()}. {arguments.processes} processes of {arguments.rounds} rounds.\n"
    )
    print("| statistics |", " | ".join(f"{n} tokens" for n in arguments.tokens), "|")
    print("|---|" + "---|" * len(columns))
    for row in zip(*(column.items() for column in columns), strict=True):
        print(f"| {row[0][0]} |", " | ".join(f"{ratio:.2f}" for _, ratio in row), "|")


def _start() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)


def ratios(tokens: int, rounds: int, heads: int = 8, key_heads: int = 8) -> dict[str, float]:
    """Measure, for each request, the median of the time of `look` over `attention`."""
    q, k, v = (torch.randn(1, n, tokens, 64) for n in (heads, key_heads, key_heads))
    out = ch.attention(q, k, v, mask=ch.causal)
    problem, inputs = make_problem(q, k, v, Options(mask=ch.causal))
    assert choose(problem, "auto").name == "cpu"
    calls = {AGAIN: lambda: ch.attention(q, k, v, mask=ch.causal)}
    for name, stats in requests(tokens).items():
        assert can_count(problem, inputs, parse_stats(stats)), f"the core does not compute {name}"
        assert torch.equal(ch.look(q, k, v, mask=ch.causal, stats=stats).out, out)
        calls[name] = lambda stats=stats: results(ch.look(q, k, v, mask=ch.causal, stats=stats))
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            pair = [calls[name], calls[AGAIN]]
            order = random.sample([0, 1], 2)
            seconds = {i: seconds_per_call(pair[i], threads=1) for i in order}
            measured[name].append(seconds[0] / seconds[1])
    return {name: statistics.median(x) for name, x in measured.items()}


def results(look: ch.Look) -> list[object]:
    """Read all statistics."""
    return [getattr(look, name) for name in look.names]


if __name__ == "__main__":
    main()
