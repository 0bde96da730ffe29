"""Measure `why(over="rows")`, the mean over all queries of a text, beside one forward pass.

    python -m bench.why --tokens 4096 8192 32768 --rounds 3

The model is a Llama of three layers with random weights; the head that is split is in the last one,
behind all parts. Forward passes and calls of `why` take turns in one process with one thread, and
times are processor times, because other programs may share the machine. The table has the medians,
and the memory at its peak beyond that of the forward pass, each in a process of its own.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaModel

import clearhead as ch
from clearhead import hf

LAYERS, HEADS, KEY_HEADS, SIZE = 3, 4, 2, 256


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def peak() -> float:
    """Return the most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(tokens: int, rounds: int) -> None:
    """Print the line of the table for a text of `tokens` tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hf.register()
    config = LlamaConfig(
        vocab_size=1000, hidden_size=SIZE, intermediate_size=2 * SIZE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, use_cache=False,
        max_position_embeddings=tokens, attn_implementation="clearhead",
    )  # fmt: skip
    model, ids = LlamaModel(config).eval(), torch.randint(1000, (1, tokens))

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    def why() -> None:
        ch.why(model, ids, layer=LAYERS - 1, head=1, over="rows")

    ch.why(model, ids[:, :64], layer=LAYERS - 1, head=1, over="rows")
    forward()
    before = peak()
    pairs = [(seconds(forward), seconds(why)) for _ in range(rounds)]
    times = [statistics.median(x) for x in zip(*pairs, strict=True)]
    ratio = statistics.median(b / a for a, b in pairs)
    print(
        f"| {tokens:,} | {times[0]:.2f} s | {times[1]:.2f} s | {ratio:.2f} | "
        f"{peak() - before:.0f} MB |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if len(chosen.tokens) == 1:
        measure(chosen.tokens[0], chosen.rounds)
        return
    print("| tokens | forward pass | why | ratio | memory beyond it |\n|---|---|---|---|---|")
    for tokens in chosen.tokens:
        command = [sys.executable, "-m", "bench.why", "--tokens", str(tokens)]
        subprocess.run([*command, "--rounds", str(chosen.rounds)], check=True, env=os.environ)


if __name__ == "__main__":
    main()
