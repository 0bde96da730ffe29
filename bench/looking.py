"""Measure the time of `look` as a multiple of `attention`'s, for each statistic.

    python -m bench.looking --tokens 16 128 1024 4096

It uses one thread, float32, and 8 causal heads of size 64. In each round every statistic is timed
in a random order, with `attention` just before or just after it. The table has the medians of these
ratios. Times are processor times, because other programs may share the machine. `attention` is also
compared with itself: the distance of that row from 1 shows the error of the others.
"""

import argparse
import random
import statistics

import torch

import clearhead as ch
from bench.timing import seconds_per_call
from clearhead.engines.choice import choose
from clearhead.engines.cpu import can_count, status
from clearhead.problem.check import Options, make_problem
from clearhead.stats import Statistic, parse_stats

STATISTICS: dict[str, list[str | Statistic]] = {
    '`"lse"`': ["lse"],
    '`"entropy"`': ["entropy"],
    '`"entropy"`, `topk(3)`': ["entropy", ch.topk(3)],
    '`"received"`': ["received"],
    '`"received"`, `pooled(64, 64)`': ["received", ch.pooled(64, 64)],
}
AGAIN = "`attention` again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    columns = [ratios(tokens, arguments.rounds) for tokens in arguments.tokens]
    print(f"Engine `cpu`: {status()}. Medians of {arguments.rounds} rounds.\n")
    print("| statistics |", " | ".join(f"{n} tokens" for n in arguments.tokens), "|")
    print("|---|" + "---|" * len(columns))
    for name in [AGAIN, *STATISTICS]:
        print(f"| {name} |", " | ".join(f"{column[name]:.2f}" for column in columns), "|")


def ratios(tokens: int, rounds: int) -> dict[str, float]:
    """Measure, for each entry of STATISTICS, the median of the time of `look` over `attention`."""
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    out = ch.attention(q, k, v, mask=ch.causal)
    problem, inputs = make_problem(q, k, v, Options(mask=ch.causal))
    assert choose(problem, "auto").name == "cpu"
    calls = {AGAIN: lambda: ch.attention(q, k, v, mask=ch.causal)}
    for name, stats in STATISTICS.items():
        assert can_count(problem, inputs, parse_stats(stats)), f"the core does not compute {name}"
        assert torch.equal(ch.look(q, k, v, mask=ch.causal, stats=stats).out, out)
        calls[name] = lambda stats=stats: ch.look(q, k, v, mask=ch.causal, stats=stats)
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            pair = [calls[name], calls[AGAIN]]
            order = random.sample([0, 1], 2)
            seconds = {i: seconds_per_call(pair[i], threads=1) for i in order}
            measured[name].append(seconds[0] / seconds[1])
    return {name: statistics.median(x) for name, x in measured.items()}


if __name__ == "__main__":
    main()
