"""Time another version of the code beside this one, in turns.

    python -m bench.paired OTHER/.venv/bin/python --rounds 15

OTHER is a checkout of the other version, such as a worktree, in which `make setup` ran. Each
version has a process of its own, which waits while the other one is timed. A round times both in a
random order. The table has the median of this version's seconds divided by the other's, and that of
this version divided by itself in a third process: the error. One thread; times are processor times.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SECONDS = 0.2  # of a sample


def cases() -> dict[str, Callable[[], object]]:
    """Return what is timed, by name. It calls only what every version has."""
    import torch

    import clearhead as ch

    torch.manual_seed(0)

    def inputs(
        B: int, H: int, Tq: int, D: int, Tk: int = 0, G: int = 0, dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        shapes = (H, Tq), (G or H, Tk or Tq), (G or H, Tk or Tq)
        return [torch.randn(B, heads, T, D).to(dtype) for heads, T in shapes]

    bf16 = torch.bfloat16
    prefill, short = inputs(1, 8, 2048, 64), inputs(1, 9, 128, 64, G=3)
    narrow = inputs(1, 8, 2048, 64, dtype=bf16)
    decode = inputs(1, 32, 1, 128, 8192, 8)
    decode_bf16 = inputs(1, 32, 1, 128, 8192, 8, bf16)
    tiny, small = inputs(1, 1, 5, 4), inputs(1, 8, 16, 64)
    trained = [x.requires_grad_() for x in inputs(1, 8, 1024, 64)]
    few = [x.requires_grad_() for x in inputs(1, 8, 32, 64)]

    def training(of: list[torch.Tensor]) -> object:
        out = ch.attention(*of, mask=ch.causal)
        return torch.autograd.grad(out, of, torch.ones_like(out))

    return {
        "prefill, causal, 2,048": lambda: ch.attention(*prefill, mask=ch.causal),
        "prefill, no mask, 2,048": lambda: ch.attention(*prefill),
        "prefill, causal, 2,048, bf16": lambda: ch.attention(*narrow, mask=ch.causal),
        "prefill, window 128, 2,048": lambda: ch.attention(*prefill, mask=ch.window(127, 0)),
        "prefill, causal, 128": lambda: ch.attention(*short, mask=ch.causal),
        "decode, 8,192 keys": lambda: ch.attention(*decode),
        "decode, 8,192 keys, bf16": lambda: ch.attention(*decode_bf16),
        "training, causal, 1,024": lambda: training(trained),
        "training, causal, 32": lambda: training(few),
        "small, 5 tokens": lambda: ch.attention(*tiny),
        "small, 5 tokens, causal": lambda: ch.attention(*tiny, mask=ch.causal),
        "small, 16 tokens, causal": lambda: ch.attention(*small, mask=ch.causal),
        "look entropy, 128": lambda: ch.look(*short, mask=ch.causal, stats=["entropy"]),
        "look entropy, 2,048": lambda: ch.look(*prefill, mask=ch.causal, stats=["entropy"]),
        "look topk, 2,048": lambda: ch.look(*prefill, mask=ch.causal, stats=[ch.topk(3)]),
        "look received, 2,048": lambda: ch.look(*prefill, mask=ch.causal, stats=["received"]),
    }


def work() -> None:
    """Print the names of the cases, and the seconds per call of each that is read."""
    import torch

    torch.set_num_threads(1)
    runs = cases()
    print(*runs, sep="|", flush=True)
    for line in sys.stdin:
        run, calls = runs[line.strip()], 0
        run()
        begin = time.process_time()
        while time.process_time() - begin < SECONDS:
            run()
            calls += 1
        print((time.process_time() - begin) / calls, flush=True)


class Version:
    """A process of one version, which waits for names of cases."""

    def __init__(self, python: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([python, __file__, "--work"], text=True, **pipes)
        self.cases = self.read().split("|")

    def read(self) -> str:
        return self.process.stdout.readline().strip()

    def seconds(self, case: str) -> float:
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        return float(self.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="that of the other version")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", default="", help="only those that begin with this")
    chosen = parser.parse_args()
    this, other, again = (Version(x) for x in (sys.executable, chosen.python, sys.executable))
    print("| case | us | to the other | to itself |\n|---|---|---|---|")
    for case in (x for x in this.cases if x.startswith(chosen.cases)):
        seconds: dict[Version, list[float]] = {this: [], other: [], again: []}
        for _ in range(chosen.rounds):
            for version in random.sample(list(seconds), len(seconds)):
                seconds[version].append(version.seconds(case))
        own = seconds[this]
        to = [
            statistics.median(a / b for a, b in zip(own, seconds[x], strict=True))
            for x in (other, again)
        ]
        print(
            f"| {case} | {statistics.median(own) * 1e6:.1f} | {to[0]:.3f} | {to[1]:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    if "--work" in sys.argv:
        work()
    else:
        main()
