"""Measure times and ceilings on a machine that other processes also use.

With one thread, time is the processor time of this process. With more threads, a sample during
which the process did not have all its processors is discarded and repeated, a few times.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from clearhead.core.engines.cpu import core

from .cases import Case

SAMPLE_SECONDS = 0.03
TRIES = 5


def seconds_per_call(run: Callable[[], Any], threads: int) -> float:
    """Measure the seconds per call in one undisturbed sample, or else in the best disturbed one."""
    run()
    start = time.process_time()
    run()
    calls = max(1, int(SAMPLE_SECONDS / max(time.process_time() - start, 2e-6)))
    best = float("inf")
    for _ in range(TRIES):
        wall, busy = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        if threads == 1:
            return busy / calls
        best = min(best, wall / calls)
        if busy > 0.93 * wall * (threads if wall / calls > 2e-4 else 1):
            return wall / calls
        time.sleep(0.02)
    return best


def ratios_in_turns(
    kinds: Sequence[str], seconds_of: Callable[[str], float], rounds: int
) -> tuple[float, dict[str, float]]:
    """Measure each kind between two runs of the kind "without", in a random order in each round.

    Returns the seconds of the last run without, and for each kind the median of its seconds divided
    by the mean of the two runs around it.
    """
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    before = seconds_of("without")
    for _ in range(rounds):
        for kind in random.sample(kinds, len(kinds)):
            between = seconds_of(kind)
            after = seconds_of("without")
            ratios[kind].append(2 * between / (before + after))
            before = after
    return before, {kind: statistics.median(of) for kind, of in ratios.items()}


class Ceilings:
    """The largest numbers of operations or bytes per second that this machine reaches now."""

    def __init__(self) -> None:
        self.memory = torch.ones(2**26)  # 256 MB; untouched zeros would share one page

    def fma(self, threads: int) -> float:
        """Measure fused multiply-adds."""
        return _most(lambda: core.fma_ceiling(threads, 0.02))

    def dot(self, threads: int) -> float:
        """Measure dot products of bf16 pairs, or fused multiply-adds if there are none."""
        return _most(lambda: core.dot_ceiling(threads, 0.02)) or self.fma(threads)

    def read(self, threads: int) -> float:
        """Measure bytes read from memory, in one sample, as for each peer.

        Other processes also use the memory. The best of several samples would be compared with an
        average of the peer.
        """
        address, size = self.memory.data_ptr(), self.memory.numel() * 4
        return core.read_ceiling(address, size, threads, SAMPLE_SECONDS)


def summary(
    case: Case,
    work: float,
    ceilings: Sequence[float],
    seconds: Mapping[str, list[float]],
    shares: Mapping[str, list[float]],
    ours: list[float] | None,
) -> dict[str, Any]:
    """Compute the medians of a case: its ceiling, and the numbers of every peer.

    These are the time, the rate in 10^9, the fraction of the ceiling, and the multiple of our time
    in the same round.
    """
    return {
        "case": case.name,
        "unit": "GB/s" if case.decode else "GFLOP/s",
        "ceiling": statistics.median(ceilings) / 1e9,
        "peers": {
            name: {
                "seconds": statistics.median(times),
                "rate": work / statistics.median(times) / 1e9,
                "share": statistics.median(shares[name]),
                "times ours": ours
                and statistics.median(s / o for s, o in zip(times, ours, strict=True)),
            }
            for name, times in seconds.items()
        },
    }


def _most(measure: Callable[[], float]) -> float:
    return max(measure() for _ in range(3))
