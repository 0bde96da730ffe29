"""Measure what `watch` adds to a forward pass of a model, for each statistic.

    python -m bench.watching --model DIR --tokens 128 1024 --rounds 9

One thread and processor times, because other programs may share the machine. In each round the
kinds run in a random order, each between two passes without `watch`, whose mean it is compared
with; the table has the medians. "without" is such a pass itself: its distance from 1 shows the
error of the others.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import clearhead as ch
from bench.timing import ratios_in_turns
from clearhead.core.stats import Statistic
from clearhead.hf import Checkpoint

GROUPS = {"first": ch.prefix(1), "previous": ch.window(0, 0, align=-1), "local": ch.window(15, 0)}
KINDS: dict[str, list[str | Statistic] | None] = {
    "without": None,
    "lse": ["lse"],
    "entropy": ["entropy"],
    "entropy, topk(3)": ["entropy", ch.topk(3)],
    "entropy, mass": ["entropy", ch.mass(GROUPS)],
    "entropy, received": ["entropy", "received"],
    "entropy, value_weighted": ["entropy", ch.value_weighted(GROUPS, by="value")],
}


def seconds_of_pass(model: nn.Module, ids: torch.Tensor, kind: str) -> float:
    stats = KINDS[kind]
    begin = time.process_time()
    if stats is None:
        model(ids, use_cache=False)
    else:
        with ch.watch(model, stats=stats):
            model(ids, use_cache=False)
    return time.process_time() - begin


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    model = Checkpoint(chosen.model).module
    for tokens in chosen.tokens:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(100, model.config.vocab_size, (1, tokens), generator=generator)
        seconds_of = partial(seconds_of_pass, model, ids)
        for kind in KINDS:
            seconds_of(kind)
        seconds, ratios = ratios_in_turns(list(KINDS), seconds_of, chosen.rounds)
        print(f"{tokens} tokens, {seconds:.3f} s a pass")
        for kind, ratio in ratios.items():
            print(f"{kind:24} {ratio:.3f}")


if __name__ == "__main__":
    main()
