"""Measure what `monitor` adds to a step of a training, as a multiple of the step without it.

    python -m bench.monitor --model DIR --tokens 512 --rounds 9

A step is a forward and a backward pass, without logits, which would make it longer, and SGD. In
each round a step of each kind runs between two without a monitor, whose mean it is compared with;
the table has the medians. A monitor has logged a step before, of 8 tokens. Times are processor
times, because other programs may share the machine. "without" is such a step itself: its distance
from 1 is the error of the others. At ``every=50`` the cost is a 50th of that of a logged step.
"""

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

import clearhead as ch
from bench.timing import ratios_in_turns
from clearhead.hf import Checkpoint

KINDS = {
    "without": None,
    "between logged steps": ("max",),
    "max": ("max",),
    "all": ch.models.monitor.metrics.METRICS,
}


def seconds_of_step(model: nn.Module, ids: torch.Tensor, kind: str) -> float:
    optimizer, stats = torch.optim.SGD(model.parameters(), lr=1e-9), KINDS[kind]
    every = 1_000 if "between" in kind else 1
    monitor = stats and ch.monitor(model, every=every, stats=stats)
    if monitor:  # the first logged step finds W_Q and W_K
        model(ids[:, :8]).last_hidden_state.square().mean().backward()
        monitor.step()
        optimizer.zero_grad()
    begin = time.process_time()
    model(ids).last_hidden_state.square().mean().backward()
    optimizer.step()
    if monitor:
        monitor.step()
    optimizer.zero_grad()
    elapsed = time.process_time() - begin
    if monitor:
        monitor.close()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = Checkpoint(chosen.model).module.train()
    ids = torch.randint(100, 40_000, (1, chosen.tokens), generator=torch.Generator().manual_seed(0))
    seconds_of = partial(seconds_of_step, model, ids)
    seconds_of("all")
    seconds, ratios = ratios_in_turns(list(KINDS), seconds_of, chosen.rounds)
    print(f"{chosen.tokens} tokens, {seconds:.2f} s a step")
    for kind, ratio in ratios.items():
        print(f"{kind:22} {ratio:.3f}")


if __name__ == "__main__":
    main()
