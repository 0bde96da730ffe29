"""Measure what the host does for a call of the engines for a GPU, without a GPU:

    python -m bench.host

Kernels are found in the cache of compiled ones, as after the first call, and start nothing; torch's
fused kernels only allocate their results. Tensors are on the CPU, so allocations differ from those
of a GPU, and CUDA's own start is not included. They are small, because torch's operations between
the kernels compute here.
"""

import os
from collections.abc import Callable
from time import process_time
from types import SimpleNamespace
from typing import Any

import torch

ROUNDS, CALLS = 15, 40


class NothingStarts:
    """A cache of kernels in which each is compiled, a compiled kernel, and Triton's launcher. No
    kernel starts."""

    function, packed_metadata, global_scratch_size, profile_scratch_size = 0, (4, 1, 0), 0, 0

    def get(self, key: object) -> "NothingStarts":
        return self

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments: None

    @property
    def run(self) -> "NothingStarts":
        return self

    def __call__(self, *arguments: object) -> None:
        self.launch(*arguments)

    def launch(self, *arguments: object) -> None:
        pass


def results_only(of: Any) -> tuple[torch.Tensor, ...]:
    """Allocate the results of a fused kernel of torch, or of its gradient, and compute nothing."""
    q, k, v = of.q, of.k, of.v
    if hasattr(of, "dout"):
        return tuple(torch.empty_like(x) for x in (q, k, v))
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def calls_of_engines() -> dict[str, Callable[[], Any]]:
    """Return the calls to measure, by name."""
    import clearhead as ch
    from clearhead.core.masks.key_group import duplicate_keys

    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    x = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    groups = {"sink": ch.prefix(1), "near": ch.window(before=3, after=0)}
    copies = {"copies": duplicate_keys(torch.arange(32) % 5)}
    seed, plain = torch.randn(1, 2, 32, 16), [y.detach() for y in x]

    def decode(engine: str) -> None:
        ch.attention(q, k, v, mask=ch.Causal(align="end"), engine=engine)

    def train(engine: str) -> None:
        out = ch.attention(*x, mask=ch.causal, engine=engine)
        torch.autograd.grad(out, x, seed)

    def look(*wanted: Any) -> None:
        ch.look(*plain, mask=ch.causal, stats=wanted, engine="triton")

    return {
        "decoding": lambda: decode("triton"),
        "decoding, fused": lambda: decode("fused"),
        "causal, fused": lambda: ch.attention(*plain, mask=ch.causal, engine="fused"),
        "training step": lambda: train("triton"),
        "training step, fused": lambda: train("fused"),
        "look, lse": lambda: look("lse"),
        "look, entropy": lambda: look("entropy"),
        "look": lambda: look("entropy", ch.topk(8), "received", ch.pooled(8, 8)),
        "look, mass": lambda: look("lse", "max", "entropy", ch.mass(groups)),
        "look, mass by ids": lambda: look(ch.mass(copies)),
    }


def measure_host(rounds: int = ROUNDS, calls: int = CALLS) -> dict[str, float]:
    """Return the microseconds of processor time of each call: the least of some rounds.

    `TRITON_INTERPRET` must be 1 when triton is imported, so that the engines accept a CPU.
    """
    from clearhead.core.engines.gpu.fused import operator
    from clearhead.core.engines.gpu.triton import start

    compiled, torchs, driver = start._compiled, operator.FOR_CPU, start.driver
    start._compiled = NothingStarts()  # type: ignore[assignment]  # a stub
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    start.driver = SimpleNamespace(active=active)  # type: ignore[assignment]  # a stub
    operator.FOR_CPU = operator.Kernel(results_only, results_only)  # type: ignore[arg-type]  # both
    try:
        return {name: _least(run, rounds, calls) for name, run in calls_of_engines().items()}
    finally:
        start._compiled, operator.FOR_CPU, start.driver = compiled, torchs, driver


def _least(run: Callable[[], Any], rounds: int, calls: int) -> float:
    seconds = []
    for _ in range(rounds):
        begin = process_time()
        for _ in range(calls):
            run()
        seconds.append(process_time() - begin)
    return min(seconds) / calls * 1e6


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    for name, microseconds in measure_host().items():
        print(f"{name:21} {microseconds:7.0f} us")
