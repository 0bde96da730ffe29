"""Times and ceilings that can be trusted on a machine that others use too.

Other people's work is not our time: with one thread the clock is the processor time of this
process; with more, a sample in which it did not get its processors is thrown away and taken again,
a few times.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from ..engines.cpu import core

SAMPLE_SECONDS = 0.03
TRIES = 5


def once(run: Callable[[], Any], threads: int) -> float:
    """Seconds per call, from one undisturbed sample; the best of the disturbed if none was."""
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


class Ceilings:
    """What this machine can do at most, in operations or bytes per second."""

    def __init__(self) -> None:
        self.memory = torch.ones(2**26)  # 256 MB that exist: untouched zeros would share one page

    def fma(self, threads: int) -> float:
        return _most(lambda: core.fma_ceiling(threads, 0.02))

    def dot(self, threads: int) -> float:
        """Of bf16 pairs; where there is no such instruction, of FMA."""
        return _most(lambda: core.dot_ceiling(threads, 0.02)) or self.fma(threads)

    def read(self, threads: int) -> float:
        """One sample, as each peer gets: memory is shared with the machine's neighbours, and the
        best of three readings beside one of every peer's would measure them."""
        address, size = self.memory.data_ptr(), self.memory.numel() * 4
        return core.read_ceiling(address, size, threads, SAMPLE_SECONDS)


def _most(measure: Callable[[], float]) -> float:
    return max(measure() for _ in range(3))  # a ceiling is what the machine can do
